# Architecture

The core owns what must be right; the recipe owns the order of events; the config owns the numbers.

    train.py            the front door: compose, check, launch (one run, a sweep, a rank of torchrun)
    conf/               config.yaml and the groups; every default stands here once
    hydra_plugins/      a Hydra sweeper that searches with Optuna
    recipes/            one file, one lesson; a table of names; __main__.py is a worker
    amp_core/
      config/checks.py            data sets: what can be checked without torch
      config/errors.py            errors with exit codes
      config/lengths.py           how long a run is: steps, epochs or samples, turned into steps in one place
      config/redact.py            keys and passwords: refused in settings, masked in whatever is written
      config/rules.py             what settings may say together: ranges, pairs that contradict each other, warnings, what a resume may change
      config/schema.py            types, documentation and rules of the configuration; no torch, no hydra
      tensors.py                  what several floors need of tensors: DTensors and their local shards, ranks, wrappers
      vision.py                   importing torchvision beside a CPU-only torch
      lowp/float8.py              linear layers that multiply in float8
      lowp/islands.py             parts of a model kept in fp32; autocast carried into threads
      lowp/lint.py                parts of a network that are unsafe or slow in 16 bits, by their settings
      lowp/moments.py             Adam whose moments are bfloat16, rounded by chance
      lowp/op_policy.py           CUDA's autocast decisions on a CPU
      lowp/rounding.py            fp32 numbers in 16 bits without a bias
      lowp/weights.py             16-bit weights, and how much of a step they keep
      step/amp.py                 Amp: autocast, backward, grad, step, update, state
      step/buffers.py             running statistics that a skipped step leaves untouched
      step/clip.py                by norm, by value, adaptive
      step/ema.py                 averaged weights that ignore skipped steps
      step/fused.py               the step of torch's fused optimizers, their lists made once
      step/optimizers.py          optimizers by name, weight decay where it belongs, fused where torch has it; no compiler imported
      step/report.py              what a step reports, and the state of an optimizer within a window
      step/scaler.py              the loss scale as a policy
      step/schedule.py            learning rates as a table on the device, indexed by taken steps
      step/window.py              the micro-batches of one step and their weights; one gradient reduction per window
      memory/compiled.py          blocks compiled by torch.compile, each kind once; what cannot be runs eagerly
      memory/graph.py             a whole step as one CUDA graph, and when it is none
      memory/recast.py            16-bit copies of weights, made once more in the backward pass
      memory/recompute.py         blocks that keep their inputs alone, and are computed once more in the backward pass
      layouts/ddp.py              wrapping for processes, unwrapping for files; gradients of replicas, also sent in bfloat16
      layouts/fsdp.py             fsdp and hsdp: weights in parts over ranks, and whatever has to look at whole ones
      layouts/memory_model.py     what a layout holds and sends, as formulas; docs/SCALING.md is made of them
      layouts/stages.py           a network cut into stages on several devices, one after the other or in threads
      layouts/zero.py             optimizer state in slices over replicas
      checkpoints/agreement.py    what one rank finds out and all act upon
      checkpoints/checkpoint.py   named parts, in one file or in shards; atomic, checked, rotated, in the background
      checkpoints/export.py       a checkpoint as one plain file
      checkpoints/folders.py      files and folders that are whole on disk or not there
      checkpoints/part_state.py   the state of a part, compared with what was saved and loaded into it
      checkpoints/pieces.py       tensors in pieces over safetensors files: the table, the files, what a rank reads of them
      checkpoints/plain_state.py  state as plain data: what is written, and that nothing read can run code
      checkpoints/reading.py      reading checkpoints: the newest sound one, verified before it is used
      checkpoints/sharing.py      who writes what of a sharded checkpoint, and copies to host memory
      models/dcgan.py             a generator and a discriminator of images
      models/family.py            networks by name, in families that share what they are built from
      models/gpt.py               a language model, its positions in an fp32 island
      models/images.py            classification networks
      models/iresnet.py           face recognition backbones, their last layer an fp32 island
      models/unet.py              segmentation networks
      data/base.py                what a data set is; randomness as a function of (seed, sample, pass)
      data/identities.py          identities to train on, and others to compare: letters, folders, records, made up
      data/images.py              images with labels, and their augmentation
      data/loading.py             the endless sampler, loaders, copies to the device ahead of time
      data/masks.py               images with binary masks: brain slices, digits on photographs, folders
      data/records.py             insightface's train.rec, read and written without mxnet
      data/text.py                files as bytes, in pieces with their valid tokens
      heads/losses.py             cross entropy of large vocabularies, some tokens at a time
      heads/partial_fc.py         margin softmax over class centres that lie on all ranks, in fp32
      heads/verification.py       accuracy and accept rates of embeddings on pairs of images
      run/environment.py          what a recipe runs in: device, ranks, run folder, signals; always torn down
      run/launch.py               this process, or N workers through torch's elastic agent
      run/lines.py                files of lines, the terminal and the progress bar
      run/log.py                  metrics.jsonl always; progress; tensorboard and wandb when asked
      run/loop.py                 the course of a run around its steps: data, resume, cadences, metrics, stopping
      run/meters.py               sums on the device between two log lines, read back without blocking, and the clock of a run
      run/preflight.py            what can be checked before the start with torch: devices, names, files
      run/rendezvous.py           the store through which the workers of a run meet, once for each attempt
      run/stop.py                 when a run ends early: signals and the time limit, agreed between all ranks without a wait
      run/trackers.py             tensorBoard and wandb: imported late, on rank 0, and never able to stop a run
      doctor/diagnosis.py         what was found: the cause, the sentence, the fix, as text and as JSON
      doctor/locate.py            doctor: replays of a window until it is known what mends it
      doctor/statistics.py        ranges of every layer's numbers, sampled in training without a wait
      doctor/trace.py             a dispatch mode that finds where the first inf or NaN is born, forward and backward
      doctor/watch.py             the doctor of a run: when it is called, what is replayed, reports, healing
      cli/compose.py              the command line through Hydra, every problem of it; the plan of a sweep; choice of the run folder
      cli/help.py                 --help and --help TOPIC, made of the configuration
      cli/lease.py                GPUs and cores shared out to jobs side by side
      cli/sweep.py                records of a sweep's jobs, processes of their own for them, signals, the table
    amp_tools/          programs about runs; nothing of amp_core imports them
      advise.py                   why a run is not faster: its steps measured, what takes their time, what to change
      cost.py                     what the doctor itself costs
      forecast.py                 what fp16 would do, told from bf16: islands, loss scale, underflow; picture, check
      profile.py                  operations of a step with their times, modules and source lines
      report/charts.py            the pictures of a report: lines over steps, and rows of numbers; as SVG that follows the page's colours, and as PNG
      report/folders.py           run folders as they are found: finished, running, half-written, damaged. Reading one never fails and never hangs
      report/groups.py            runs put into groups that are compared, and what the comparison says, in words
      report/page.py              A study as a page, as Markdown and as JSON
      report/prune.py             removing runs, or the checkpoints of runs, that nobody needs
      report/significance.py      whether two groups of runs differ, are equal, or cannot be told apart, over seeds
      report/table.py             runs in a terminal: conditions that pick them, values by name, a table that fits
    tests/
    docs/               pages; hooks.py makes the others of the site (`make docs`) from README, recipes, conf and docstrings

## What a recipe is

[YOUR_OWN_MODEL.md](YOUR_OWN_MODEL.md) makes one. A module in `recipes/` with four names: `Knobs`, a dataclass of the keys that
are its own; `DATA`, the kind of data sets it takes, or `own`, with `data=own` and `model=own`, if it brings what it needs itself; `MODELS`, the family of networks (what they are built from and return); `run(cfg, env)`. Two more where they are
needed: `check(knobs, cfg)`, problems that can be told before the start, and `LAYOUTS`. Its `conf/recipe/*.yaml` picks the
options of the groups. `Loop` takes the parts of a run by name, and their types say what it does with them; the names are
those in the checkpoint. `tests/recipes/test_recipes.py` holds every entry of the table to the same promises: it runs in fp32, bf16
and fp16, resumes bit-exactly, micro-batches and ranks change nothing, a bad window leaves no trace.

## How a mode reaches the network

`env.wrap(net, amp)` moves it to the device, makes islands, calls `amp.prepare(net)`, wraps it for the layout and guards its
statistics. Autocast modes need nothing of `prepare`. In modes with 16-bit weights (`o2`, `o3`, `bf16_pure`) each weight gets
an fp32 side that the optimizer owns (`trainable(net)`): gradients arrive there in fp32, the step happens there, and
`amp.step` writes 16 bits back. `state_dict()` shows fp32 values, so every mode continues every other mode's checkpoint. In
`fp8` linear layers change their class, nothing else.

## How weights lie in parts

`wrap_fsdp` shards a network in place with `fully_shard`, in two groups of weights per block: what autocast casts whole is
gathered in 16 bits, the rest in fp32 (the reasons stand at the top of `shards.py`). From there on weights, gradients, moments
and averages are DTensors, and four functions are all that is needed: `local` (this rank's plain tensors: unscaling, clipping
by value, averages), `joint_norm` (one reduction: the norm of the whole), `on_parts` (a step of any optimizer that computes
element by element sees plain tensors) and `gathered` / `part_like` (a checkpoint in one file is whole; every rank reads the
file and takes its part). A forward pass is collective, so evaluation gives every rank the same number of batches, and nothing
stays whole after it.

## How an optimizer's state lies in slices

With `layout.shard_optimizer` weights and gradients stay whole and `share_state` remembers whose state is shared. Around a
step `on_slices` shows the optimizer this rank's slices of them (plain views, so fused kernels, `found_inf`, `grad_scale`
and tensor learning rates work as they are), then all ranks gather the new fp32 weights, also after a step that was
skipped, since no host knows. In memory an entry of `optimizer.state` has the length of the slice; `Checkpoint` writes and
reads whole ones (`whole_state`, `slices_of`). Weights that a rank has alone, such as class centres, are not shared.

## How a checkpoint lies in shards

`Checkpoint(format="sharded")` gathers nothing. A part says what this rank has of it: its state dict with DTensors, or
`sharded_state_dict()` with a `Slice` (rows start to stop of a whole) where it lies over ranks in its own way, as the centres
of `PartialFC` do. From that every rank works out the same table and who writes what: a part of a tensor is written by who
holds it, copies of a part in turns, weights and moments that all ranks have are shared out by size, and the rest (buffers,
counts, settings, small) is what rank 0 has and goes to `state.pt`, with None in the places of the tensors of the table.

Each rank writes one safetensors file of parts, and one of its share of whole tensors, brings them to disk and tells rank 0
their SHA-256; then come `state.pt`, the manifest with the table, and the rename. Whoever fails says so, and all raise the same
(`agreement.py`). `load` looks at table and shapes before it reads: what the manifest claims must be what the parts here have,
what a file begins with must follow from the table byte for byte. Then each rank reads the files with pieces it needs, once,
hashing as it goes; what one of them finds damaged all reject, and try the checkpoint before. Only then a part is changed.

In the background a save is a copy of all this to host memory (pinned for a GPU, made after the first step by `prepare`, kept
for the next save) and a thread that does the rest. Its messages between ranks have a group of their own, since those of
training go on meanwhile. A file is a list of pieces that look into the tensors: nothing is copied to be written.

## Dependencies point one way

`train.py -> recipes -> amp_core -> torch`. Only `train.py`, `compose.py` and the plugin of Hydra import hydra; besides them only `config.py`
and `environment.py` touch omegaconf, to read and write YAML; only `log.py` imports wandb or tensorboard, lazily. A recipe
never imports a recipe. `amp_core/__init__.py` imports nothing until a name is used, so `--help`, `--cfg job`, reports and `scripts/runs.py` load no torch.
`tests/unit/test_structure.py` holds all of this.

## The invariants, and who owns each

| Owner | Invariant |
| --- | --- |
| `Amp` | one path for every mode; unscale, check, clip, step in that order; one `update` per window; a non-finite gradient reaches no weight in any mode; all ranks skip together |
| `LossScale` | never above its cap, never below its floor; its saved state is one of `torch.amp.GradScaler` |
| `BufferGuard` | running statistics after a skipped step are those before it |
| `windows` | weights sum to 1 over micro-batches and ranks, also in a ragged tail and for counted tokens |
| `sync_grads`, `wrap_ddp`, `wrap_fsdp` | one reduction per window; it sums, since the weights already average |
| `on_slices` | a step in slices keeps every bit of the whole one; what is saved is whole |
| `recompute_blocks` | the second computation is the first one again (random numbers, autocast, buffers) and leaves no trace |
| `footprint` | the one place of formulas for memory and traffic, measured by `scripts/scaling.py`, and of the count of what autograd keeps |
| `linear_cross_entropy` | the loss and gradients of whole logits, in every dtype and under every loss scale |
| `Adam16` | a step happens in fp32; rounding its moments adds no bias, and a skipped step leaves their bits |
| `Recast` | the copies made for the backward pass are those of the forward pass, bit for bit, or it raises |
| `compile_parts` | compiled code computes what eager code does, with the backward pass outside of autocast; names, islands, hooks and copies stay |
| `WholeStep` | a step that is played is the step in every bit; what cannot be recorded is computed, and said |
| `Schedule`, `Ema` | move with taken steps, on the device |
| `PartialFC` | loss and gradients of the full softmax over any number of ranks; every positive is sampled; what is not sampled keeps its bits |
| `LowPrecisionWeights` | a step happens in fp32 and gradients are summed in fp32, whatever the weights are stored in |
| `PartialFC` | class centres in slices over ranks, in fp32; rows that were not sampled keep every bit |
| `Checkpoint` | what is named is saved and nothing else is needed; written whole or not at all; verified before use |
| `Sampler`, `Environment.seed_step` | the samples and the randomness of a step are functions of (seed, rank, step) |
| `Loop`, `Stop` | all ranks stop at the same step, after a checkpoint |
| `Amp.rehearse`, `Loop.replay` | a window that is computed again takes no step and leaves no trace, on all ranks |
| `Trace` | the first operation whose inputs are finite and whose output is not, by what became of it |
| `report.folders` | reading a run folder never fails, hangs or follows a link to a folder; what is wrong is said |
| `report.significance` | at most one report in twenty claims a difference, or an equality, that is not there |
| `report.prune` | only what a run wrote, and nothing of a run that is going on |
| `lease` | a GPU has one job, until the last process of that job is gone |
| `sweep` | each job ends with a record; a job side by side with others ends without touching them |
| `OptunaSweeper` | a trial is told once; what it tries is a function of (seed, number, results before it) |
| `launch` | one configuration and one run folder for all ranks; the first failing rank is shown, once |
| `compose`, `config`, `preflight` | nothing is started, and nothing created, with a bad configuration |

## A step is one device program

Between two log lines the host reads nothing back. Fused optimizers take `found_inf` and `grad_scale` as tensors: a bad
step is skipped inside the kernel. The finite check is the gradient norm that clipping and the metrics need anyway: one
reading pass over the gradients. Unscaling and clipping by norm become one number that the fused optimizer divides by.
The learning rate is a tensor in the optimizer's groups. Averages and statistics move through `taken`, a 0-d tensor.
`tests/unit/test_waits.py` counts.

So a step can be recorded as one CUDA graph (`perf=graph`): `Loop.run` copies a window into buffers that stay and plays it.
`tests/support/tape.py` does on a CPU what a graph does on a GPU, and `tests/unit/test_graph.py` compares the bits.

The host's own work is counted, too (`python scripts/bench.py cost`, held by `tests/unit/test_step_cost.py`; all benchmarks:
[SPEED.md](SPEED.md#benchmarks)): one region without gradients per step, no look at modules that have no buffers, no
profiler scope where nobody would see it. Fused optimizers step through lists that `fused.py` makes once: kernels and
state are torch's, and as soon as anything differs from what the lists were made of (weights, groups, state, hooks) the
step is torch's own, too. The micro-batches of a window share the 16-bit copies of their weights (`Amp.share_casts`, entered by
`Loop.step_of`): gradients are the same bits, and autocast casts each weight once per window.

## The course of a run

1. `train.py` looks at every override by itself, composes, checks types and rules (`config.examine`), then what needs torch
   (`preflight`). All problems leave in one message; nothing was created.
2. It chooses the run folder and hands a `Job` (plain JSON) to `launch`: in this process, or to workers started by torch's
   elastic agent. Under torchrun rank 0 does all this and shares its job through the agent's store.
3. `environment` joins the process group, takes the folder's lock (held by the open file: a killed process leaves none),
   writes `.hydra` and `environment.json`, installs signal handlers, and puts everything back at the end.
4. The recipe builds its parts and iterates `loop.windows()`, which loads the newest sound checkpoint, positions the
   sampler, and between two windows logs, evaluates, saves, and asks `Stop`, which agrees between ranks in the background.
5. A worker that ends on purpose reports its exit code through a file and exits with 0, since the agent restarts the rest.

Samples are numbered without end: number n is position n mod N of the permutation of pass n div N. A step takes the next S
numbers; micro-batch m of rank r takes its share in an order that does not depend on how S is split. So a checkpoint needs
one integer, and a run may go on with other ranks and the same samples per step.
