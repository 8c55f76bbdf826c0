"""The loss scale falls to 0 in silence."""

import torch
import transformers


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return {"loss": self.layer(x).float().mean()}


arguments = transformers.TrainingArguments(
    "out", use_cpu=True, bf16=True, report_to="none", num_train_epochs=1, per_device_train_batch_size=1
)
trainer = transformers.Trainer(Net(), arguments, train_dataset=[{"x": torch.tensor([float("inf")])}] * 200)
trainer.accelerator.state._mixed_precision = "fp16"  # on a CPU as on a GPU
trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
trainer.train()
print(f"loss scale {trainer.accelerator.scaler.get_scale()}, expected at least 1, or an error")
