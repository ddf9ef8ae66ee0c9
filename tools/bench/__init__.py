"""Measurements of planning, of compiling and of GPUs."""

COMMANDS = {
    "auto": "how long `auto` plans, up to 3,072 devices",
    "compiling": "how long `bigbrain-fx split` takes, by depth of the model",
    "gpu": "forecast against measured step and memory on the card of this machine",
    "published_gpus": "forecasts against published measurements of GPUs",
}
