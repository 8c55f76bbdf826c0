"""Other programs' names for settings that have another name here, and why some do not exist here."""

from __future__ import annotations

HYDRA = {
    "hydra.run.dir": "a sweep has a folder of its own; use hydra.sweep.dir=multirun/mine",
    "hydra.sweep.subdir": "each job gets a folder named after its overrides; leave it out",
    "hydra.output_subdir": "the run folder always holds .hydra; leave it out",
    "hydra.job.chdir": "paths are relative to where you start, and run_dir= is the output folder; leave it out",
    "hydra.job.name": "a run is named by its folder; use run_dir=runs/mine",
    "hydra.job.env_set": "set variables in the shell, before the command; leave it out",
    "hydra/sweeper/sampler": "is a key of the sweeper; use hydra.sweeper.sampler=tpe",
    "hydra.callbacks": "a callback names a class (_target_), and a config never runs code; leave it out",
    "hydra.searchpath": "your own YAML files are found with the flag --config-dir <folder>; leave it out",
    "hydra.verbose": "Hydra's own log is off, and train.log holds all of the run's; leave it out",
    **dict.fromkeys(("hydra/job_logging", "hydra/hydra_logging"), "log= sets what is logged; use log=none to be quiet"),
    "hydra/callbacks": "a callback names a class (_target_), and a config never runs code; leave it out",
}
"""Settings of Hydra that are not used here, why, and what to type instead."""
MEANT = {group: {word: ours for ours, said in names.items() for word in said.split()} for group, names in {
    "amp": {
        "fp16": "16 16-mixed fp16-mixed float16 half true on mixed", "fp32": "32 32-true float32 float full no false",
        "bf16": "bf16-mixed bfloat16 bfloat16-mixed bfloat", "bf16_pure": "bf16-true bfloat16-true",
        "fp8": "float8 fp8-mixed e4m3 transformer-engine", "o3": "16-true fp16-true",
    },
    "perf": {"compile": "true inductor torch_compile dynamo", "graph": "cudagraph cudagraphs cuda_graph cuda_graphs"},
    "doctor": {"watch": "true on"}, "resume": {"last": "true latest newest"}, "model.weights": {"default": "true"},
    "clip": {"norm": "true on grad_norm global_norm l2", "adaptive": "agc"},
    "layout": {
        "ddp": "multi_gpu multi-gpu distributed", "model_parallel": "pipeline pipeline_parallel pp mp", "fsdp": "fsdp1",
    },
    "log": {"default": "csv json jsonl file", "none": "quiet silent"},
    "data": {
        "imagenet": "imagenet1k imagenet-1k ilsvrc", "synthetic": "random fake dummy", "text": "txt plain_text",
        "mask_folder": "segmentation_folder masks voc pascal_voc", "telephone": "dtmf",
        "recordings": "ljspeech librispeech wav wavs common_voice audio_folder audiofolder audio",
    },
    "recipe": {
        "classification": "image_classification", "segmentation": "semantic_segmentation unet", "gan": "wgan dcgan",
        "diffusion": "ddpm edm", "contrastive": "clip simclr infonce", "policy_gradient": "rl ppo grpo reinforce",
        "experts": "moe mixture", "speech": "asr ctc", "distillation": "kd", "face_recognition": "arcface faces",
        "model_parallel": "pipeline",
    },
}.items()}  # fmt: skip
"""Values of other projects, in small letters, and ours."""
WORDS = {word: ours for ours, words in {
    "optimizer.lr": "learning_rate base_lr max_lr", "optimizer.weight_decay": "wd", "dry_run": "fast_dev_run",
    "amp": "precision mixed_precision dtype use_amp opt_level cast_dtype autocast_dtype", "data.num_workers": "workers",
    "model": "arch net", "accumulation": "gradient_accumulation_steps accumulate_grad_batches grad_accum",
    "batch_size": "bs batch b per_device_train_batch_size train_batch_size micro_batch_size per_gpu_batch_size",
    "data.length": "block_size seq_len seq_length sequence_length context context_length max_length",
    "log": "logger report_to wandb tensorboard",
    "layout.nproc_per_node": "gpus num_gpus nproc devices world_size num_processes gpus_per_node",
    "layout.nnodes": "nodes num_nodes num_machines", "layout device": "accelerator trainer strategy parallel",
    "steps": "max_steps num_steps iterations max_iters total_steps", "epochs": "max_epochs num_epochs num_train_epochs",
    "clip.max_norm": "grad_clip max_grad_norm gradient_clip_val clip_grad clip_grad_norm norm",
    "max_minutes": "max_time", "run_dir": "output_dir out_dir save_dir log_dir dir tensorboard_dir",
    "save_every": "every save_steps checkpoint_every", "eval_every": "eval_steps val_check_interval eval_interval",
    "eval.at_start": "eval_on_start", "eval.samples": "max_eval_samples limit_val_batches eval_iters",
    "log_every": "logging_steps log_every_n_steps log_interval",
    "checkpoint.keep": "save_total_limit save_top_k keep_last", "perf": "compile torch_compile",
    "perf.checkpoint_activations": "gradient_checkpointing activation_checkpointing",
    "resume": "ckpt_path resume_from_checkpoint from_checkpoint restart",
    "task": "mode train test eval_only do_train do_eval do_predict", "perf.profile": "profiler",
    "data": "dataset datamodule", "data.path": "root data_dir",
    "model.weights": "pretrained init_from initial_checkpoint checkpoint_path finetune", "log.wandb_tags": "tags",
    "log.progress": "enable_progress_bar progress_bar", "experiment": "hparams_search",
    "schedule": "lr_scheduler scheduler lr_scheduler_type",
    "amp.init_scale": "scale loss_scale static_scale static_loss_scale",
    "data.image_size": "size resolution input_size crop_size img_size", "model.options": "dropout",
    "optimizer.options": "momentum nesterov betas beta1 beta2",
    "schedule.options": "warmup_steps warmup_epochs warmup_ratio milestones gamma step_size min_lr eta_min",
    "layout.rdzv_endpoint": "master_addr master_port dist_url init_method", "clip": "clip.type clip.mode",
    "data.path data.eval_path": "train_path val_path train_dir val_dir data_path", "layout": "ddp fsdp distributed",
    "log.wandb_project": "project wandb_project", "save_every eval_every log_every": "save",
    "ema.decay": "beta model_ema ema_decay", "data.erasing": "random_erasing reprob re_prob random_erase",
    "data.augment": "aa auto_augment autoaugment rand_augment trivial_augment color_jitter",
    "data.like": "crop_pct interpolation", "optimizer.groups": "param_groups parameter_groups",
    "export.to": "export.format export.target",
    "data.target": "target target_column label_column y",
    "data.window": "lookback input_chunk_length history", "data.horizon": "forecast_horizon output_chunk_length",
    "data.sampler": "weighted_sampler sampler balanced",
}.items() for word in words.split()}  # fmt: skip
"""What other projects call our keys and groups."""
REASONS = {word: reason for words, reason in {
    "num_classes in_channels vocab_size": "the data set knows it; leave it out",
    "class_weight class_weights pos_weight": "recipe=supervised has recipe.class_weights",
    "metrics metric eval_metric": "recipe=supervised has recipe.metrics",
    "loss criterion loss_fn": "recipe=supervised has recipe.loss; other recipes have one loss",
    "shuffle": "training data is shuffled by the seed, evaluation data never; leave it out",
    "transforms transform augmentation": "use data.augment=true or false",
    "normalize mean std":
        "each data set is normalised by statistics of its own, or by those of data.like=timm:<name>; leave it out",
    "split val_split": "the data set says what it is evaluated on (--help data); leave it out",
    "download auto_download": "nothing is downloaded; data.path names what you have",
    "pin_memory persistent_workers": "always on where it helps; leave it out",
    "prefetch_factor": "workers are ahead by whole windows; leave it out",
    "drop_last": "nothing is dropped: a step takes the next samples of endless epochs; leave it out",
    "global_batch_size total_batch_size effective_batch_size":
        "it is batch_size x accumulation x ranks; set batch_size and accumulation",
    "local_rank rank": "torchrun tells each process its rank; leave it out",
    "backend dist_backend": "it is nccl on GPUs and gloo on CPUs; leave it out",
    "find_unused_parameters": "they are found; layout.static_graph=true promises that there are none",
    "cpu_offload offload": "nothing is offloaded; see perf.checkpoint_activations and layout=fsdp",
    "wrap auto_wrap_policy sharding_strategy": "fsdp shards each block; see also layout=hsdp",
    "patience early_stopping": "no run ends by its metric; the best checkpoint is kept anyway",
    "checkpoint.best": "the best checkpoint is always kept; leave it out",
    "flash_attention attn_implementation": "torch chooses the attention kernel; leave it out",
    "compile_mode perf.mode": "perf=compile has torch's default mode, perf=graph CUDA graphs",
    "ema.update_every": "the average moves with each taken step; leave it out",
    "norm_type": "clip=norm takes the L2 norm, clip=value the largest entry; leave it out",
    "master_weights": "a mode has them or not: use amp=o2 or amp=bf16_pure for 16-bit weights",
    "keep_batchnorm_fp32": "use 'amp.keep_fp32=[\"BatchNorm2d\"]'",
    "freeze frozen": "recipe=finetuning trains adapters on a frozen network; see --help finetuning",
    "level verbose": "train.log has everything; log=none is quiet",
    "label_smoothing": "use recipe.label_smoothing=0.1",
    "monitor metric_for_best_model": "each recipe names its own metric (recipe.best); leave it out",
    "enabled autocast": "a mode is chosen: use amp=fp32 for none",
}.items() for word in words.split()}  # fmt: skip
"""Keys that are no settings here, whole or their last parts, and why."""
OF_PACKAGES = {
    **dict.fromkeys(("schedulefree", "schedule_free", "adamwschedulefree"), "schedulefree.AdamWScheduleFree"),
    "lion": "timm.optim.Lion", "lamb": "timm.optim.Lamb", "adan": "timm.optim.Adan", "adopt": "timm.optim.Adopt",
    "lars": "timm.optim.Lars", "sgdschedulefree": "schedulefree.SGDScheduleFree",
}  # fmt: skip
"""Optimizers of packages by the names that people type, and what `optimizer.name` calls them."""
