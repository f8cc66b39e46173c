"""Training loops of other libraries around a parallel model.

    hugging_face         Trainer, Seq2SeqTrainer and TrainerMixin, for transformers
    accelerate           Accelerator
    lightning            ShardwrightStrategy, for Lightning's Trainer
    feeding              a check of the batches that these libraries hand to processes

Each module imports its library; none is imported with the package.
"""

from __future__ import annotations
