"""The OpenAI-compatible server.

__main__: the command. app: the routes. body: what requests ask for. reply: what answers are sent as. worker: the thread
that owns the engine. grammar: formats that answers have to follow. answer_parser: tool calls and reasoning in answers.
metrics: what operators watch.
"""
