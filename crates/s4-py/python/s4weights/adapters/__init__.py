"""Adapters that save checkpoints of training frameworks as ``.s4w`` files or in a `CheckpointStore`.

There is one module per framework, which imports the framework: ``s4weights.adapters.lightning``,
``transformers``, ``accelerate``, ``deepspeed``, ``torchtitan``, ``torch_checkpointing``, ``ray``,
``orbax``, ``keras`` and ``megatron``. The extra of the same name installs the framework, in a
checkout of the repository: ``pip install './crates/s4-py[lightning]'``.
"""
