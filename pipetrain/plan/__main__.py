"""`python -m pipetrain.plan`: a shell starts commands/plan.py here; nothing on this floor imports it."""

from importlib import import_module

if __name__ == "__main__":
    import_module("pipetrain.commands.plan").main()
