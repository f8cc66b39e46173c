"""Training loops of other libraries around a parallel model.

    hugging_face         Trainer, Seq2SeqTrainer, TrainerMixin and HuggingFaceMonitor, for transformers
    accelerate           Accelerator
    lightning            ShardwrightStrategy and LightningMonitor, for Lightning's Trainer
    monitored_loop       what the callbacks for monitors have in common
    feeding              a check of the batches that these libraries hand to processes

Each module imports its library; none is imported with the package.
"""

from __future__ import annotations
