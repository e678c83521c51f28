"""Texts that a Hugging Face collator pads to the longest of their own batch."""

import torch
import transformers
from torch.utils.data import DataLoader

import pipetrain
from pipetrain.data.text import SHAKESPEARE

LONGEST = 64
tokenizer = transformers.ByT5Tokenizer()  # in place of yours: a token is a byte
lines = [line for line in SHAKESPEARE.read_text().splitlines()[:600] if line]
rows = [tokenizer(line, truncation=True, max_length=LONGEST) for line in lines]
torch.manual_seed(0)
config = transformers.GPT2Config(
    vocab_size=len(tokenizer), n_positions=LONGEST, n_embd=32, n_layer=4, n_head=2
)
model = transformers.GPT2LMHeadModel(config)

collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=8)
loader = DataLoader(rows, batch_size=16, shuffle=True, drop_last=True, collate_fn=collator)
pipe = pipetrain.Pipeline(
    model, "model", lambda p: torch.optim.AdamW(p, 3e-3), microbatches=4, max_length=LONGEST
)
for epoch in range(2):
    for loss in pipe.train(loader):
        pass
    if pipe.rank == 0:
        print(f"epoch {epoch}: {pipe.metrics['loss']:.4f}")
