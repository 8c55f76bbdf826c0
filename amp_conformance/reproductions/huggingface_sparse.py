"""Embeddings with sparse gradients: an error, also with max_grad_norm=0."""

import torch
import transformers


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Embedding(8, 1, sparse=True)

    def forward(self, x):
        return {"loss": self.layer(x).mean()}


arguments = transformers.TrainingArguments(
    "out",
    use_cpu=True,
    bf16=True,
    report_to="none",
    num_train_epochs=1,
    per_device_train_batch_size=1,
    max_grad_norm=0.0,
)
net = Net()
optimizers = (torch.optim.SGD(net.parameters(), lr=1.0), None)
trainer = transformers.Trainer(net, arguments, train_dataset=[{"x": torch.tensor([3])}], optimizers=optimizers)
trainer.train()  # NotImplementedError: aten::linalg_vector_norm, SparseCPU
