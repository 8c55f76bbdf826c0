"""The core in a plain training loop: without Hydra, a run folder or a recipe."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from amp_core import Amp, Checkpoint, Clip, Ema, sync_grads, windows

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
inputs, targets = (torch.tensor(array, dtype=torch.float32) for array in load_diabetes(return_X_y=True))
inputs, targets = 20 * inputs, ((targets - targets.mean()) / targets.std()).unsqueeze(1)
loader = DataLoader(TensorDataset(inputs[:360], targets[:360]), batch_size=32, shuffle=True)

model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
amp = Amp.named("fp16", device=device)  # any mode: the loop below does not change
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.1, fused=True)
ema = Ema(model, decay=0.98)
amp.guard(model)  # restores BatchNorm statistics, if any, after a skipped step

for _ in range(30):
    for window in windows(loader, accumulation=4):  # 360 = 11 x 32 + 8: the ragged tail is weighted by its size
        for micro in window:
            x, y = (tensor.to(device) for tensor in micro.batch)
            with sync_grads(model, when=micro.is_last):
                with amp.autocast():
                    loss = F.mse_loss(model(x), y)
                amp.backward(loss, micro.weight)
        report = amp.step(optimizer, clip=Clip.norm(1.0))  # unscale, check, clip, step
        amp.update()
        amp.zero_grad(optimizer)
        ema.update(report)  # only if the step was taken

with torch.no_grad(), amp.autocast():
    error = F.mse_loss(ema.model(inputs[360:].to(device)), targets[360:].to(device))
print(f"mean squared error {error.item():.3f} on 82 patients that were held out; loss scale {amp.scale:.0f}")
Checkpoint("runs/mine", model=model, ema=ema, optimizer=optimizer, scaler=amp).save(step=90)
