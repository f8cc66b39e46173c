"""Other libraries' training loops around a parallel model. Each module imports its library; none is imported with the package.

    shardwright.integrations.hugging_face    Trainer, Seq2SeqTrainer and TrainerMixin, of transformers
    shardwright.integrations.accelerate      Accelerator
    shardwright.integrations.lightning       ShardwrightStrategy, of Lightning's Trainer
"""
