"""Any nn.Module as layers and the values between them."""
