"""The fixtures that the packages share."""

from served import search as search
from served import url as url
