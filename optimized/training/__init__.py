"""Training an EAGLE-3 head on text that its target writes, and measuring how well a head drafts.

One stage after another, each in its own file and each resumable: ``corpus``, ``vocabulary``, ``trainer``, ``export``;
``evaluation`` measures, ``pipeline`` runs them all.
"""

from optimized.training.corpus import Corpus, load_corpus, write_corpus
from optimized.training.evaluation import OverlapReport, measure_overlap
from optimized.training.export import write_head
from optimized.training.pipeline import train_head
from optimized.training.settings import CorpusSettings, TrainSettings
from optimized.training.student import Student, new_student, read_student
from optimized.training.trainer import train
from optimized.training.vocabulary import DraftVocabulary, choose_vocabulary

__all__ = [
    "Corpus",
    "CorpusSettings",
    "DraftVocabulary",
    "OverlapReport",
    "Student",
    "TrainSettings",
    "choose_vocabulary",
    "load_corpus",
    "measure_overlap",
    "new_student",
    "read_student",
    "train",
    "train_head",
    "write_corpus",
    "write_head",
]
