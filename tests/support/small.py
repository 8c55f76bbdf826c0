"""Settings of each recipe with which a step takes milliseconds."""

COMMON = ["device=cpu", "log.progress=false", "save_every=1000", "eval_every=1000", "log_every=1", "batch_size=4"]
IMAGES = ["data=synthetic", "data.num_samples=96", "data.image_size=8", "data.num_classes=4"]
RUN = [*IMAGES, "model.options.width=8", "device=cpu", "log.progress=false", "batch_size=8"]
"""Of the default recipe, one process."""
SMALL: dict[str, list[str]] = {
    "classification": [*IMAGES, "model.options.width=8"],
    "contrastive": [*IMAGES, "model.options.width=8", "recipe.embedding=8", "recipe.num_neighbours=3"],
    "custom_function": [*IMAGES, "model.options.width=16", "model.options.features=8"],
    "diffusion": [*IMAGES, "model.options.width=8", "recipe.num_sampler_steps=2"],
    "distillation": [*IMAGES, "recipe.teacher_options.width=8", "recipe.teacher_steps=1"],
    "experts": [*IMAGES, "data.image_size=14", "model.options.width=8", "model.options.num_experts=4"],
    "face_recognition": [
        *("data=synthetic_identities", "data.num_classes=24", "data.num_samples=96", "data.image_size=16"),
        *("recipe.embedding=16", "recipe.sample_rate=0.5"),
    ],
    "finetuning": [
        *("data.num_samples=64", "data.length=32", "recipe.base_steps=2", "recipe.rank=2"),
        *("model.options.depth=1", "model.options.width=32", "model.options.heads=2"),
    ],
    "gan": [*IMAGES, "model.options.width=8", "recipe.num_critic_steps=3"],
    "language_model": [
        *("data.num_samples=64", "data.length=32", "recipe.sample_tokens=4"),
        *("model.options.depth=1", "model.options.width=32", "model.options.heads=2"),
    ],
    "model_parallel": [*IMAGES, "model.options.width=8"],
    "policy_gradient": ["recipe.group=4", "recipe.num_places=3", "model.options.depth=1", "model.options.width=16"],
    "segmentation": ["data.num_samples=48", "data.image_size=32", "model.options.width=4", "model.options.depth=2"],
    "speech": ["data.num_samples=96", "model.options.width=8"],
    "supervised": ["model.options.width=8"],
}
