"""A checkpoint that was saved in fp16 cannot be loaded in fp32."""

import torch
import transformers


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return {"loss": self.layer(x).float().mean()}


arguments = transformers.TrainingArguments(
    "out",
    use_cpu=True,
    report_to="none",
    num_train_epochs=1,
    per_device_train_batch_size=1,
    save_steps=1,
)
rows = [{"x": torch.ones(1)}] * 2
trainer = transformers.Trainer(Net(), arguments, train_dataset=rows)
trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # on a CPU as on a GPU
trainer.train()
trainer = transformers.Trainer(Net(), arguments, train_dataset=rows)
trainer.train(resume_from_checkpoint="out/checkpoint-1")  # AttributeError: NoneType has no load_state_dict
