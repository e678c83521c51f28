"""`python -m pipetrain.plan`: see commands/plan.py."""

from pipetrain.commands.plan import main

if __name__ == "__main__":
    main()
