"""Training loops of other libraries around a parallel model.

    hugging_face         Trainer, Seq2SeqTrainer, TrainerMixin and HuggingFaceMonitor, for transformers
    accelerate           Accelerator
    lightning            ShardwrightStrategy and LightningMonitor, for Lightning's Trainer
    monitored_loop       shared: the check of the batches, and a Monitor that a library drives

Each module imports its library; none is imported with the package.
"""

from __future__ import annotations
