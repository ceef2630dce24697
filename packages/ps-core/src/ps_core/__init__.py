"""Train transformer models larger than the accelerator's memory: record, plan, verify, replay."""
