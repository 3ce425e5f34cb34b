"""Adapters: checkpoints of training frameworks as ``.s4w`` files or in a `CheckpointStore`.

One module for each framework, which imports it: ``s4weights.adapters.lightning``,
``transformers``, ``accelerate``, ``deepspeed``, ``torchtitan``, ``torch_checkpointing``, ``ray``,
``orbax``, ``keras`` and ``megatron``. The extra of the same name installs it, in a checkout of the
repository: ``pip install './crates/s4-py[lightning]'``.
"""
