"""The OpenAI-compatible server.

__main__: the command. app: the routes. body: parsing requests. prompts: their tokens. reply: formatting answers.
worker: the thread that owns the engine. leading: one engine over several processes. grammar: constraints that make
answers follow a JSON schema. answer_parser: tool calls and reasoning in answers. token_texts: texts of single tokens.
metrics: Prometheus metrics.
"""
