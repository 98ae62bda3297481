"""Model capture: any module and an example batch become a ``ModelGraph``."""
