"""One stage: its weights and their versions, its forwards and backwards, and its optimizer's step."""
