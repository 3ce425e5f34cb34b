"""Adapters: checkpoints of training frameworks as ``.s4w`` files or in a `CheckpointStore`.

One module for each framework, which imports it: ``s4weights.adapters.lightning``,
``transformers``, ``accelerate``, ``deepspeed``, ``torchtitan``, ``torch_checkpointing``, ``ray``,
``orbax``, ``keras`` and ``megatron``. The extra of the same name installs it:
``pip install 's4weights[lightning]'``.
"""
