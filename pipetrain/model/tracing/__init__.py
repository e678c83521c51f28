"""Any nn.Module as layers: torch.export records it, and the record is cut where few values cross."""
