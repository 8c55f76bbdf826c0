"""The Trainer steps on a NaN in bf16 (and in fp32), clipped or not, and logs a loss that is finite."""

import torch
import transformers


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return {"loss": self.layer(x).float().mean()}


net = Net()
arguments = transformers.TrainingArguments(
    "out", use_cpu=True, bf16=True, report_to="none", num_train_epochs=1, per_device_train_batch_size=1
)
rows = [{"x": torch.tensor([x])} for x in (1.0, float("nan"), 1.0)]
transformers.Trainer(net, arguments, train_dataset=rows).train()
print(f"weight {net.layer.weight.item()}, expected a finite one")
