"""What other libraries do at length in each process is done shortly; `cold` programs are left as they are."""

from __future__ import annotations

import yaml
from hydra._internal.hydra import Hydra
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

if yaml.__with_libyaml__:
    yaml.SafeLoader = yaml.CSafeLoader  # type: ignore[misc,assignment] # of OmegaConf
# To look for hydra.mode, which nobody sets, Hydra composes all before it composes all.
Hydra.get_mode = lambda self, **_: None  # type: ignore[method-assign]
# To name who records an event, torchrun looks through all modules 18 times: a second of a processor.
dynamic_rendezvous.get_method_name = lambda depth=2: "forked"
