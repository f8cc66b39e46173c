"""Padding: concrete calls, see `rule_cases`."""

import math

import torch
from rule_cases import rand
from rule_reference import collected

CASES, case = collected()
unpadded = torch.ops.shardwright.unpadded.default

case(3, unpadded, rand(4, 8, 2), torch.tensor([0, 2, 4, 6]), 1, 5, 0)
case(2, unpadded, rand(8, 4), torch.tensor([0, 4]), 0, 3, -math.inf)  # the second part is padding alone
case(1, unpadded, torch.arange(8), torch.tensor([0, 2, 4, 6]), 0, 7, 9)
