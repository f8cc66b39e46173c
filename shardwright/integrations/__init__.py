"""Training loops of other libraries around a parallel model. Each module imports its library; none is imported with the
package.

hugging_face         Trainer, Seq2SeqTrainer and TrainerMixin, of transformers
accelerate           Accelerator
lightning            ShardwrightStrategy, of Lightning's Trainer
feeding              how these libraries hand batches to processes
"""

from __future__ import annotations
