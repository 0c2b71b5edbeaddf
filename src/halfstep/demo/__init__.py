"""What `halfstep train` uses when it is given nothing: a small GPT and a text that every machine has."""

from halfstep.demo.model import GPT as GPT
from halfstep.demo.model import GPTConfig as GPTConfig
from halfstep.demo.text import read as read
from halfstep.demo.text import split as split
