"""Whether it fits: `python -m kvjax.plan`. Programs compiled ahead for chips that are not here, without weights.

chips: what is known of each chip. shapes: models by name. training, serving: the programs. stand_ins: what methods
need that a plan has not. program: one of them compiled, its bytes by part. hlo: what devices exchange. products: what
they multiply. ahead: a process of its own. search: what would fit. figures: what is said. table: many of them. here: a
run on this machine's own devices.
"""
