"""What people type who come from Hydra or from other programs: it works, or one sentence says what to type instead.

Hints are followed as they stand, and a run takes the result.
"""

from __future__ import annotations

import re
from typing import get_args

import pytest
from tiers import rows

import train
from amp_core.cli import compose
from amp_core.cli.job import prepare, read
from amp_core.cli.overrides import groups, typed_keys
from amp_core.cli.sweep import plan
from amp_core.cli.words import WORDS
from amp_core.config.errors import SAME, ConfigError, is_misspelt
from amp_core.config.options import choices, conf_dir
from amp_core.config.rules import validate
from amp_core.run.preflight import preflight
from recipes import find

pytestmark = pytest.mark.usefixtures("own_folder")


def key_of(text):
    return re.split(r"[=@]", text.lstrip("+~-"), maxsplit=1)[0]


def refusal(arguments):
    """What is said about a command line; None when it is taken."""
    try:
        flags = read(list(arguments), find)
        if flags.multirun:
            plan(flags.overrides, find)
        else:
            prepare(flags.overrides, find)
    except ConfigError as refused:
        return "\n".join(refused.problems)
    return None


def follow(arguments, said):
    """The command line with what the message says to type."""
    about = re.match(r"(?:unrecognized arguments: )?([^\s=:@]+)", said)[1].rstrip(".")
    wrong = next((text for text in arguments if key_of(text) == key_of(about)), None)
    if wrong is None:
        return None
    rest = [text for text in arguments if text != wrong]
    if about.startswith("-") and "=" not in wrong:  # --seed 3
        after = arguments[arguments.index(wrong) + 1 :][:1]
        rest = [text for text in rest if text not in after or "=" in text]
    if meant := re.search(r"Did you mean (.+?)\?(?= |$|;)", said):
        words = meant[1].split(" or ")[0].split()
        if not any("=" in word for word in words):  # an option, a name or a key
            key, _, value = wrong.partition("=")
            words = [f"{words[0]}={value}" if key_of(about) not in wrong or "." in words[0] else f"{key}={words[0]}"]
        return [*rest, *words]
    if meant := re.search(r"(?:use|Write) ([\w./]+=[^\s;,]+?)\.?(?=[\s;,]|$)", said):
        replaced = wrong[0] in "~-" or "@" in wrong or wrong.startswith("hydra") or key_of(wrong) == key_of(meant[1])
        replaced |= meant[1].startswith("hydra.sweep.dir")
        others = [text for text in (rest if replaced else arguments) if key_of(text) != key_of(meant[1])]
        return [*others, meant[1]]
    if meant := re.search(r"add (hydra/[\w=]+)", said):
        return [*arguments, meant[1]]
    if "add -m" in said:
        return ["-m", *arguments]
    return rest if "leave it out" in said else None


def swap(word):
    return f"{word[:-2]}{word[-1]}{word[-2]}"


TYPOS = [f"{swap(key)}={value}" for key, value in {
    "accumulation": 2, "batch_size": 32, "epochs": 1, "optimizer.weight_decay": 0.1, "schedule.horizon": 10, "ema.decay": 0.9,
    "amp.keep_fp32": "[]", "clip.max_norm": 1.0, "layout.nproc_per_node": 2, "data.augment": "false", "recipe.label_smoothing": 0.2,
}.items()]  # fmt: skip
OPTIONS = [f"{group}={swap(option)}" for group, option in {
}.items()]  # fmt: skip
NAMES = ["optimizer.name=AdmW", "model.name=resnt18", "schedule.name=warmup_cosin", "recipe.name=clasification"]
NAMES += ["device=gpu", "device=CPU", "task=trian", "steps=1e3", "batch_size=64.0", "data.prepare_on=devise"]
OTHERS = [
    "precision=16-mixed",
    "fp16=true",
    "trainer.max_epochs=2",
]
OTHERS += ["trainer=ddp", "trainer.accumulate_grad_batches=4", "data.batch_size=32"]
OTHERS += [
    "model.optimizer.lr=0.02",
    "optimizer.learning_rate=0.1",
    "lr=0.1",
]
OTHERS += ["gradient_accumulation_steps=2", "output_dir=x"]
OTHERS += [
    "model.width=8",
    "logger=tensorboard",
    "lr_scheduler=constant",
    "weight_decay=0.1",
]
OTHERS += ["amp=float16", "amp=true", "log=false", "perf=True", "layout=dp", "AMP=fp16"]
OTHERS += ["optimizer.amsgrad=true", "eval_steps=10", "clip_grad_norm=1.0"]
OTHERS += [
    "report_to=wandb",
    "compile=True",
]
OTHERS += ["steps='5'", "optimizer.lr='1e-3'", "ema.decay=None", "deterministic=yes"]
OTHERS += [
    "--fp16",
    "--lr=0.1",
    "--seed 3",
    "--dry-run",
]
HYDRA = ["~clip", "~schedule", "~doctor", "~log", "~steps", "~ema.decay", "~data", "~model", "model@teacher=cnn"]
HYDRA += ["hydra.job.chdir=true", "hydra.job.name=mine", "hydra.output_subdir=null"]
HYDRA += ["hydra.sweep.subdir=x", "hydra.sweep.dir=x", "hydra.verbose=true", "hydra/job_logging=disabled"]
HYDRA += ["hydra/hydra_logging=colorlog", "hydra.callbacks.a=1", "+hydra.callbacks.a.b=1", "hydra.mode=MULTIRUN2"]
HYDRA += ["seed=1,2", "amp=fp16,bf16", "experiment=tune", "+experiment=tune_scale"]
HYDRA += ["-m hydra.sweeper.params.seed=1,2 amp=bf16", "-m hydra.sweeper.params={seed:'1,2'}"]
HYDRA += ["-m seed=1,2 run_dir=x", "-m seed=1,2 hydra.run.dir=x", "-m optimizer.lr=interval(0.001,0.1)", "-m seeds=1,2"]
HYDRA += ["-m seed=1,2 hydra/launcher=joblibb", "-m seed=1,2 hydra/launcher=joblib hydra.launcher.njobs=2"]
HYDRA += ["hydra.job.env_set.A=1", "hydra.job.env_set.OMP_NUM_THREADS=1", "-m hydra.launcher=joblib seed=1,2"]
HYDRA += ["-m seed=1,2 hydra.launcher.n_jobs=2", "-m hydra.sweeper.n_trials=2 optimizer.lr=0.1,0.2"]
HYDRA += ["-m hydra/sweeper=optuna hydra/sweeper/sampler=tpe seed=1,2", "log=wandb,tensorboard"]
HYDRA += ["-m hydra/sweeper=optuna hydra.sweeper.n_trials=2 seed=1,2"]
RULES = ["schedule.name=OneCycleLR schedule.options={max_lr:0.1,total_steps:99}"]
RULES += ["amp=bf16 amp.init_scale=1024", "layout.nproc_per_node=2", "clip.max_norm=1.0", "schedule=none"]
RULES += ["amp=fp16 amp.scaling=false", "layout.bucket_mb=3", "data.num_classes=5", "perf.dynamic=true"]
RULES += ["perf.graph=maybe"]
WRONG = [*TYPOS, *OPTIONS, *NAMES, *OTHERS, *HYDRA, *RULES]
NO_OTHER_WAY = {"perf.graph=maybe", "trainer.x=1"}
"""Those that only name what is valid."""


@pytest.mark.parametrize("line", rows(WRONG, every=16))
def test_a_hint_that_is_followed_is_taken(line):
    arguments = line.split()
    for _ in range(2):
        said = refusal(arguments)
        assert said is not None and "\n" not in said and "Multiple values" not in said, (line, said)
        arguments = follow(arguments, said)
        if line in NO_OTHER_WAY:
            assert arguments is None and ("Valid: " in said or "expected" in said)
            return
        assert arguments is not None, said
        if refusal(arguments) is None:
            return
    pytest.fail(f"{line}: {said} -> {arguments}: {refusal(arguments)}")


WORKS = [
    "amp=fp16", "+amp=fp16", "++amp=fp16", "+steps=5", "++steps=5", "steps=null", "epochs=1.5", "optimizer.lr=1e-3",
    "+experiment=null", "ema={decay:0.9,warmup:true}", "optimizer.options.betas=[0.9,0.99]", "+model.options.width=8",
    "optimizer.options={betas:[0.9,0.99]}", "++model.options={width:8}", "log.wandb_tags=[a,b]", "log.wandb_project='a b'",
    "batch_size=${accumulation}", "eval_every=${save_every}", "seed=${oc.decode:'7'}",
    "batch_size=int(32.0)", "optimizer.lr=float(1)", "log.wandb_project=str(3)", "deterministic=bool(1)", "run_dir=null", "run_dir=grün",
    "hydra.run.dir=x", "hydra.run.dir=x/${now:%Y-%m-%d}", "hydra.job.chdir=false", "hydra.mode=RUN",
    "-m seed=1,2", "--multirun seed=1,2", "hydra.mode=MULTIRUN seed=1,2", "seed=1,2 -m", "-m seed=range(1,4)",
    "-m seed=range(start=1,stop=9,step=2)", "-m seed=choice(1,2)", "-m amp=glob([fp*,bf*],exclude=*_*)",
    "-m +amp=fp16,fp32", "-m seed=sort(3,1,2)", "-m seed=sort(1,2,reverse=true)", "-m seed=shuffle(1,2,3)",
    "-m seed=shuffle(range(1,4))", "-m optimizer.lr=tag(log,choice(0.1,0.2))", "-m log.wandb_tags=[a],[b]",
    "-m ema={decay:0.9,warmup:true},{decay:null,warmup:true}", "-m model.options.width=8,16", "-m model=cnn,mlp seed=1,2",
    "-m hydra.sweeper.max_batch_size=2 seed=1,2",
    "-m hydra/launcher=joblib hydra.launcher.n_jobs=2 seed=1,2", "-m +hydra/launcher=joblib seed=1,2", "-m experiment=tune",
    "-m hydra/sweeper=optuna hydra.sweeper.num_trials=3 optimizer.lr=interval(0.001,0.1)", "-m +experiment=default_gan",
    "-m hydra/sweeper=optuna batch_size=int(interval(8,32)) amp=glob(fp*)", "-m hydra.sweep.dir=x/${now:%H} seed=1,2",
]  # fmt: skip
SENTENCES = {
    "trainer=gpu": "called layout or device here: python train.py --help layout device",
    "data.data_dir=x": "called data.path here: python train.py --help data.path",
    "ckpt_path=no/such": "called resume here: python train.py --help resume",
    "run_dir=${hydra:runtime.cwd}/x": "${hydra:...} has no value",
    "-m hydra/sweeper=optuna hydra.sweeper.storage=x seed=1,2": "no such key. Valid: num_trials, ",
    "-m hydra/launcher=joblib hydra.launcher.n_jobs=0 seed=1": "n_jobs=0: expected",
    "amp.keep_fp32=a,b": "brackets",
    "steps=???": "Missing mandatory value",
    "--config-name other": "--config-dir <folder> experiment=mine",
    "--config-path conf": "--config-dir <folder>",
    "--config-dir no/such/folder": "there is no such folder",
    "--experimental-rerun x": "run_dir=<folder of the run>",
    "model._target_=os.system": "a config never runs code",
    "+hydra.callbacks.a._target_=os.system": "a config never runs code",
    "hydra/callbacks=x": "a callback names a class",
    "hydra.searchpath=[x]": "--config-dir <folder>",
    "-m hydra.sweeper.params=3": "use seed=1,2,3",
    "-m seed=interval(1,3)": "use hydra/sweeper=optuna",
    "-m experiment=default_gan,default_contrastive": "start one after the other",
    "-m hydra.launcher.n_jobs=1,2 seed=1,2": "expected one value",
    "-m seed=glob(*)": "write the values: seed=a,b",
    "amp.init_scale=${nothing}": "'nothing' not found",
}


@pytest.mark.parametrize("line", rows(WORKS, every=8))
def test_what_hydra_documents_works(line):
    assert refusal(line.split() if "'a b'" not in line else [line]) is None


@pytest.mark.parametrize("line", rows(SENTENCES, every=2))
def test_what_of_hydra_is_not_used_is_refused_in_one_sentence(line):
    said = refusal(line.split())
    assert said is not None and SENTENCES[line] in said and "\n" not in said and "Multiple values" not in said


def test_what_others_call_an_option_by_another_name_is_one():
    literals = {value for hint in typed_keys().values() for kind in (hint, *get_args(hint)) for value in get_args(kind)}
    assert SAME.keys() <= {option for group in groups() for option in choices(group)} | literals | {"last", "never"}


def test_every_key_that_others_call_by_another_name_is_explained(capsys):
    for targets in {*WORDS.values()}:
        assert train.main(["--help", *targets.split()]) == 0, targets
    assert not capsys.readouterr().err


# What a new user types, and a part of the answer: what to type, or why not. `NO` before a text: it may not be said.
IMAGES = "data=synthetic data.image_size=8 data.num_samples=32 data.num_classes=4 model.options.width=8 device=cpu"
MISTAKES = {
    "bs=4": "Did you mean batch_size=4?",
    "dropout=0.1": "Did you mean model.options.dropout=0.1?",
    "betas=[0.9,0.95]": "Did you mean optimizer.options.betas=[0.9,0.95]?",
    "amp=fp_16": "Did you mean fp16?",
    "layout.gpus=2": "Did you mean layout=ddp layout.nproc_per_node=2?",
    "optimizer.lr=1e-3x": "optimizer.lr=1e-3x: expected a number",
    f"{'a' * 5000}=1": f"error: {'a' * 200}...",
    "optimizer.layer_decays=0.7": "Did you mean optimizer.layer_decay=0.7? NO weight_decay",
    "optimizer.weight_decay_rate=0.1": "optimizer.options.<name> NO Did you mean",
    "optimizer.eps=1e-6": "Did you mean optimizer.options.eps=1e-6?",
    "optimizer=Lion": "Did you mean optimizer.name=timm.optim.Lion?",
    "optimizer=AdamW": "Did you mean adamw?",
    "optimizer=adam8bit": "Did you mean adamw_8bit?",
    "optimizer.name=adamw": "Did you mean AdamW?",
    "optimizer.name=LARS": "there is no such optimizer NO Did you mean",
    "optimizer.lr=-1": "optimizer.lr=-1: expected a finite number above 0 NO refuses",
    "amp=16-true": "Did you mean o3?",
    "amp=int8": "Valid: bf16, NO Did you mean",
    "amp.scale=1024": "Did you mean amp=fp16 amp.init_scale=1024? NO min_scale",
    "amp.init_scale=2**16": "Write amp.init_scale=65536",
    "amp.enabled=false": "amp=fp32",
    "resume=latest": "Did you mean last?",
    "resume=best": "Valid: auto, last, never. NO Did you mean",
    "--resume": "Did you mean resume=last?",
    "--amp bf16": "Did you mean amp=bf16? Settings NO ?;",
    "--batch-size 32 --lr 0.1": "Did you mean batch_size=32 optimizer.lr=0.1?",
    "--config x.yaml": "--config-dir <folder> experiment=mine NO ambiguous",
    "--gpus 2": "Did you mean layout=ddp layout.nproc_per_node=2?",
    "--help nothing_like_it": "there is no such topic",
    "--help optimzer": "Did you mean optimizer?",
    "help": "Did you mean --help?",
    "fp16": "Did you mean amp=fp16?",
    "amp": "see --help amp",
    "dry_run": "Did you mean dry_run=true?",
    "steps:5": "Did you mean steps=5?",
    "steps = 5": "steps = 5: has spaces",
    "steps=10k": "Write steps=10000",
    "steps=1e30": "expected a whole number NO Write",
    "model=resnet18.a1_in1k": "Did you mean model=timm model.name=resnet18.a1_in1k? Its pretrained weights",
    "model=resnet34": "Did you mean model.name=resnet34? NO iresnet34",
    "model=resnet18 model.weights=IMAGENET1K_V1": "expected default, a file",
    "model.depth=3": "model.options.<name>",
    "data=csv data.path=x": "data/<name>.py NO data.path",
    "recipe=detection": "Detectors have no recipe",
    "data=ljspeech": "Did you mean recordings?",
    "data=voc": "Did you mean mask_folder?",
    "task=export export.to=torchscript run_dir=.": "Did you mean pt2?",
    "model.rename={'a':b}": "names before a colon without quotes: 'key={a:b}'",
    "data=imagefolder data.path=x": "Did you mean image_folder? NO has no effect",
    "data=mnist": "Did you mean mnist_subset?",
    "data.batch_size=4": "Did you mean batch_size=4?",
    "data.train_path=x": "data.path or data.eval_path",
    "data.shuffle=true": "shuffled by the seed",
    "recipe=language_model data=text data.path=train.bin": "train.bin is a .bin file",
    "recipe=language_model data=text data.path=texts": "b.txt is no text: it has zero bytes",
    "recipe=language_modle optimizer.lr=-1 data=text": "Did you mean language_model? NO optimizer.lr",
    "schedule=cosine": "Did you mean warmup_cosine?",
    "schedule=CosineAnnealingLR": "Did you mean schedule.name=CosineAnnealingLR?",
    "schedule.warmup=0.1": "Did you mean schedule.options.warmup=0.1?",
    "schedule.options.warmup_steps=100": "Valid: warmup, final NO Did you mean",
    "clip=1.0": "Did you mean clip=norm clip.max_norm=1.0?",
    "ema=0.99": "ema.decay=",
    "layout=zero": "Did you mean layout=ddp layout.shard_optimizer=true?",
    "layout=ddp layout.nproc=2": "Did you mean layout.nproc_per_node=2?",
    "layout=ddp layout.nproc_per_node=99999999999999999999": "2^63 NO too many",
    "device=0": "CUDA_VISIBLE_DEVICES=0",
    "log=tensorboard,wandb": "use log=all",
    "task=test": "Did you mean evaluate?",
    "experiment=mnist": "default_gan",
    "amp fp16": "error: amp fp16: expected key=value. Did you mean amp=fp16?",
    "predict runs/first": "Did you mean task=predict run_dir=runs/first?",
    "-m seed=1 2 3": "seed=1 2 3: several values have commas between them. Did you mean seed=1,2,3?",
    "-m seed=[1,2,3]": "Several values are a sweep: -m seed=1,2,3.",
    "seed=1,2 optimizer.lr=0.1,0.2": "seed=1,2: several values are a sweep; add -m NO lr",
    "hydra/sweeper=optuna seed=1,2": "has an effect only in a sweep; add -m NO seed=1,2:",
    "optimizer.options.betas=[0.9, 0.95]": "put it in quotes: 'optimizer.options.betas=[0.9, 0.95]'",
    "-b 64": "Did you mean batch_size=64?",
    "--local_rank=0": "torchrun tells each process its rank; leave it out",
    "--pretrained": "called model.weights here",
    "clip=0": "Did you mean clip=none? NO norm",
    "clip.norm_type=1": "clip=norm takes the L2 norm",
    "resume=null": "Did you mean never?",
    "resume.path=x": "resume is a value; write resume=x",
    "deterministic=1": "Write deterministic=true.",
    "max_minutes=2h": "Write max_minutes=120.",
    "max_minutes=00:30:00": "Write max_minutes=30.",
    "log.wandb_mode=off": "Valid: auto, online, offline. NO Did you mean",
    "log.dir=logs": "Did you mean run_dir=logs?",
    "data=image_folder data.root=nowhere": "called data.path here NO data.path=null",
    "recipe=language_model data.block_size=64": "Did you mean data.length=64?",
    "data=imagenet1k data.path=x": "Did you mean imagenet? NO data.path",
    "model=efficientnet": "Did you mean model.name=efficientnet_b0 or efficientnet_b1 or efficientnet_b2, ...?",
    "model=gpt2": "model=timm and model=hf take others",
    "model=timm:resnet18": "Did you mean model.name=timm:resnet18?",
    "optimizer=lbfgs": "LBFGS needs a closure NO Did you mean",
    "optimizer.name=torch.optim.Adam": "Did you mean Adam?",
    "optimizer.options.betas=0.9": "optimizer.options.betas=0.9: expected 2 numbers, such as [0.9, 0.999]",
    "schedule=plateau": "ReduceLROnPlateau needs a metric NO Did you mean",
    "schedule.name=StepLR": "schedule.name=StepLR: needs schedule.options.step_size",
    "schedule.total_steps=100": "Did you mean steps=100?",
    "perf.benchmark=true": "Did you mean perf.cudnn_benchmark=true?",
    "global_batch_size=256": "set batch_size and accumulation",
    "train=false": "called task here",
    "recipe=ppo": "Did you mean policy_gradient?",
    "recipe=supervised recipe.class_weight=balanced": "Did you mean recipe.class_weights?",
    "steps=5 epochs=2": "expected at most one of steps, epochs, samples",
    "steps=1000000000000": "expected at most 100,000,000",
    f"{IMAGES} epochs=1e12 dry_run=true": "expected at most 100,000,000",
    "seed=9999999999999999999999": "expected at most 2^63 - 1",
    "-m seed=range(1,100000000000)": "are 1e+11 jobs; expected at most 10,000",
    "-m optimizer.lr=range(0.0,1.0,1e-12)": "are 1e+12 jobs; expected at most 10,000",
    f"run_dir={'a' * 5_000_000}": "has 5,000,008 characters, expected at most 8,192",
    f"amp.keep_fp32=[{'a,' * 100_000}a]": "has 200,017 characters, expected at most 8,192",
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("line", MISTAKES, ids=lambda line: line[:60])
def test_a_mistake_is_answered_once_with_what_was_meant_and_with_nothing_else(line, own_folder, capsys):
    (own_folder / "train.bin").write_text("some text\n")
    (own_folder / "texts").mkdir()
    (own_folder / "texts" / "a.txt").write_text("some text\n")
    (own_folder / "texts" / "b.txt").write_bytes(b"a\0b")
    before = sorted(own_folder.rglob("*"))
    code = train.main(line.split())
    said = capsys.readouterr().err
    expected, _, unwanted = MISTAKES[line].partition(" NO ")
    assert code == 2 and expected in said, said
    assert said.count("\n") == 1 and len(said) < 1500 and not (unwanted and unwanted in said), said
    assert sorted(own_folder.rglob("*")) == before


@pytest.mark.parametrize(
    "word, name, is_one",
    [
        ("acumulation", "accumulation", True),
        ("lerning_rate", "learning_rate", True),
        ("fp_16", "fp16", True),
        ("layer_decay", "weight_decay", False),
        ("max_scale", "min_scale", False),
        ("fp8", "fp16", False),
        ("save_every", "eval_every", False),
        ("warmup_steps", "warmup", False),
        ("ddp", "fsdp", False),
        ("tpu", "xpu", False),
        ("sdg", "sgd", True),
    ],
)
def test_a_slip_of_the_hand_is_told_from_another_meaning(word, name, is_one):
    assert is_misspelt(word, name) == is_one


def test_no_setting_or_option_is_a_slip_for_another_whose_meaning_differs():
    """Else a hint for one could name the other: what is that near is listed here."""
    names = [key.rpartition(".")[2] for key in typed_keys()]
    near = {tuple(sorted((a, b))) for a in names for b in names if a < b and is_misspelt(a, b)}
    assert near <= {("step", "steps"), ("sampler", "samples")}
    for group in groups():
        near = {(a, b) for a in choices(group) for b in choices(group) if a < b and is_misspelt(a, b)}
        assert near <= {
            ("adam", "adamw"),
            ("ddp", "fsdp"),
            ("fsdp", "hsdp"),
            ("iresnet18", "resnet18"),
            ("iresnet50", "resnet50"),
        }


@pytest.mark.parametrize(
    "topic, expected",
    [
        ("lr", "optimizer.lr: a number"),
        ("nproc", "layout.nproc_per_node: a whole number"),
        ("batch", "batch_size: a whole number"),
        ("fp16", "amp=fp16 sets"),
        ("weight_decay", "optimizer.weight_decay: a number"),
        ("amp", "amp.growth_interval (a whole number or null)"),
        ("clip=norm", "max_norm: 1.0"),
        ("optimizer.lr ema", "ema.decay: a number or null"),
        ("sweep", "hydra/launcher=joblib"),
    ],
)
def test_help_finds_topics_also_by_the_names_of_other_programs(topic, expected, capsys):
    assert train.main(["--help", *topic.split()]) == 0 and expected in capsys.readouterr().out


def test_samples_that_a_step_takes_twice_are_said(capsys):
    assert train.main([*IMAGES.split(), "batch_size=800", "dry_run=true"]) == 0
    assert "a step takes 800 samples of a data set of 32, so each one 25 times" in capsys.readouterr().out
    assert train.main([*IMAGES.split(), "batch_size=32", "dry_run=true"]) == 0
    assert "samples of a data set" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_over_nothing_is_said(capsys):
    small = [*IMAGES.split(), "steps=1", "log.progress=false", "hydra.sweep.dir=s", "-m"]
    assert train.main(small) == 0 and "-m: one job, since no setting has several values" in capsys.readouterr().out
    assert train.main([*small, "seed=1,2"]) == 0 and "one job" not in capsys.readouterr().out


LOG = "{version: 1, handlers: {h: {class: logging.FileHandler, filename: precious, mode: w}}, root: {handlers: [h]}}"
OF_HYDRA = [
    ("hydra_logging", LOG),
    ("job_logging", "{version: 1, handlers: {h: {(): ext://os.getcwd}}, root: {handlers: [h]}}"),
    ("job_logging", "{formatters: {f: {(): os.getcwd}}}"),
    ("callbacks", "{a: {_target_: os.getcwd}}"),
    ("output_subdir", "x"),
    ("run", "{dir: x}"),
    ("sweep", "{subdir: ../../x}"),
    ("job", "{chdir: true}"),
    ("job", "{env_set: {LD_PRELOAD: x}}"),
    ("verbose", "true"),
]
PACKAGE = "# @package _global_\n"
FILES = {
    "seed: 3": "experiment=mine: the file has to begin with the line # @package _global_",
    "": "experiment=mine: the file has to begin with the line # @package _global_",
    f"{PACKAGE}defaults: [/amp: fp16]": "amp: has an option already; write `- override /amp: fp16`",
    f"{PACKAGE}defaults: [override amp: fp16]": "override amp: write `- override /amp: ...`",
    f"{PACKAGE}defaults: [override /trainer: gpu]": "override trainer: there is no such group. Valid: amp",
    f"{PACKAGE}defaults: [override /data: mnist]": "data=mnist: there is no such option. Did you mean",
    f"{PACKAGE}hydra: {{sweeper: {{n_trials: 20}}}}": "hydra.sweeper.n_trials: In 'experiment/mine'",
    f"{PACKAGE}hydra: {{sweeper: {{params: {{seed: [1, 2]}}}}}}": "params.seed: a list is one value; write",
    f"{PACKAGE}hydra: {{sweeper: {{params: {{sead: '1,2'}}}}}}": "Did you mean seed=1,2?",
    f"{PACKAGE}hydra: {{sweeper: {{params: {{amp: 'fp16,fp61'}}}}}}": "Did you mean fp16?",
    f"{PACKAGE}run_dir: ${{hydra:runtime.cwd}}/x": "${hydra:...} has no value",
    f"{PACKAGE}optimizer: {{lr: '1e-3'}}": "Write optimizer.lr=0.001, without quotes.",
    f"{PACKAGE}model: {{options: &a {{b: *a}}}}": "nested too deeply",
    f"{PACKAGE}model: {{options: {'{a: ' * 5000}1{'}' * 5000}}}": "nested too deeply",
    f"{PACKAGE}model:\n  options:\n" + "".join(f"    k{i:05d}: 1\n" for i in range(3500)): "and 3460 more",
}
ROWS = [(text, ["-m"] if "params" in text else [], said) for text, said in FILES.items()]
ROWS += [
    (f"{PACKAGE}hydra: {{{key}: {value}}}", flags, f"error: hydra.{key}")
    for key, value in OF_HYDRA
    for flags in ([], ["-m", "seed=1,2"])
]


@pytest.mark.one_in(8)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("text, flags, said", ROWS, ids=range(len(ROWS)))
def test_a_file_that_is_refused_is_answered_at_once_and_opens_nothing(text, flags, said, own_folder, capsys):
    (own_folder / "experiment").mkdir()
    (own_folder / "experiment" / "mine.yaml").write_text(text + "\n")
    (own_folder / "precious").write_text("kept")
    assert train.main(["--config-dir=.", *flags, "experiment=mine", "dry_run=true"]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 + 40 * said.startswith("and ")
    assert (own_folder / "precious").read_text() == "kept"
    assert sorted(path.name for path in own_folder.iterdir()) == ["experiment", "precious"]


@pytest.mark.parametrize("recipe, is_warned", [("classification", True), ("mine", False)])
@pytest.mark.parametrize("name", ["hf:theirs", "cnn"])
def test_weights_beside_a_network_are_mentioned_where_a_recipe_of_ours_would_not_load_them(
    recipe, is_warned, name, own_folder
):
    """Not of a recipe of one's own, which may load them itself, and not of a folder with the name of a network."""
    for folder in ("theirs", "cnn"):
        (own_folder / folder).mkdir()
        (own_folder / folder / "model.safetensors").touch()
    (own_folder / "recipe").mkdir()
    (own_folder / "recipe" / "mine.py").write_text("from recipes.classification import DATA, MODELS, Knobs, run\n")
    text = (conf_dir() / "recipe" / "classification.yaml").read_text()
    (own_folder / "recipe" / "mine.yaml").write_text(text.replace("name: classification", "name: mine"))
    compose.use_config_dir(".")
    cfg, _, broken = validate(compose.compose([f"recipe={recipe}", f"model.name={name}"]))
    said = " ".join(preflight(cfg, find(recipe), broken)[1])
    assert ("its weights are not used" in said) == (is_warned and name != "cnn")
