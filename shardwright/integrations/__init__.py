"""Other libraries' training loops around a parallel model. Each room imports its library; nothing here is imported with the
package.

    shardwright.integrations.hugging_face    Trainer of transformers, Accelerator of accelerate
    shardwright.integrations.lightning       a strategy of Lightning's Trainer
"""
