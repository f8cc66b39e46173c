"""Training loops of other libraries around a parallel model.

    hugging_face         Trainer, Seq2SeqTrainer, TrainerMixin and MonitorCallback, for transformers
    accelerate           Accelerator
    lightning            ShardwrightStrategy and MonitorCallback, for Lightning's Trainer
    monitored_loop       what the callbacks for monitors have in common
    feeding              a check of the batches that these libraries hand to processes

Each module imports its library; none is imported with the package.
"""

from __future__ import annotations
