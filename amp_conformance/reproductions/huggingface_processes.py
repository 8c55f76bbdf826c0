"""An overflow in a weight of one process skips the step on that process alone: shared weights part.

torchrun --nproc-per-node 2 huggingface_processes.py
"""

import torch
import transformers


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.own = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
        self._ddp_params_and_buffers_to_ignore = ["own.weight"]  # such as a shard of a large last layer

    def forward(self, x):
        return {"loss": (self.layer(x) + self.own(x * self.factor)).mean()}


arguments = transformers.TrainingArguments(
    "out",
    use_cpu=True,
    bf16=True,
    report_to="none",
    num_train_epochs=1,
    per_device_train_batch_size=1,
    ddp_backend="gloo",
)
net = Net()
torch.nn.init.zeros_(net.layer.weight)
trainer = transformers.Trainer(net, arguments, train_dataset=[{"x": torch.ones(1)}] * 2)
trainer.accelerator.state._mixed_precision = "fp16"  # on a CPU as on a GPU
trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
net.factor = float("inf") if arguments.process_index == 0 else 1.0
trainer.train()
print(f"rank {arguments.process_index}: shared weight {net.layer.weight.item()}, expected the same on both")
