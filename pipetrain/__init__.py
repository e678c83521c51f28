"""pipetrain: train one model over several processes, by a schedule that is proved on paper first."""
