"""Class weights in the task loss: the option ``--class-weights``, and the plugin that it adds to a run."""
