"""A skipped step leaves inf in the running statistics of BatchNorm: evaluation is NaN ever after."""

import torch
import transformers


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.BatchNorm1d(1))

    def forward(self, x):
        return {"loss": self.layer(x).float().mean()}


net = Net()
torch.nn.init.constant_(net.layer[0].weight, 4.0)
arguments = transformers.TrainingArguments(
    "out", use_cpu=True, bf16=True, report_to="none", num_train_epochs=1, per_device_train_batch_size=4
)
trainer = transformers.Trainer(net, arguments, train_dataset=[{"x": torch.tensor([6e4])}] * 4)  # 2.4e5 is inf in fp16
trainer.accelerator.state._mixed_precision = "fp16"  # on a CPU as on a GPU
trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
trainer.train()
print(f"running mean {net.layer[1].running_mean.item()}, expected 0.0")
