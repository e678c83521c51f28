"""pipetrain: trains one model over several processes, by a schedule that is checked before the start."""
