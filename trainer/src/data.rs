//! The text, and which samples of it a leaf takes.
//!
//! A sample is `context` bytes and the bytes that follow each of them. Which ones a leaf takes is a pure function of
//! (seed, step, virtual rank). The bytes are compared between members by [`Corpus::digest`], not by path.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use ripstop::Sampler;
use types::{Digest, Remedy, Step, VirtualRank, VirtualRanks};

use crate::TrainerConfig;

/// A text, read once and held in memory.
#[derive(Clone)]
pub struct Corpus {
    text: Vec<u8>,
    digest: Digest,
}

impl Corpus {
    /// Reads `config.data`: a file, or all regular files under a folder (links inside are not followed) in the order of their
    /// paths, one after the other. Without a path it is the bundled text.
    ///
    /// # Errors
    /// If it can't be read, is too large, or is too short for one sample.
    pub fn load(config: &TrainerConfig) -> Result<Self, CorpusError> {
        let text = match &config.data {
            None => BUNDLED.to_vec(),
            Some(path) => read(path)?,
        };
        let origin = || config.data.clone().unwrap_or_else(|| PathBuf::from("the bundled text"));
        if text.is_empty() {
            return Err(CorpusError::Empty { path: origin() });
        }
        let needed = config.context + 1;
        if text.len() < needed {
            return Err(CorpusError::Short {
                path: origin(),
                found: text.len(),
                needed,
                context: config.context,
            });
        }
        let digest = Digest::of(&text);
        Ok(Self { text, digest })
    }

    /// The digest of all bytes.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// The bytes.
    #[must_use]
    pub fn text(&self) -> &[u8] {
        &self.text
    }

    /// Deals the text's samples to virtual ranks: each at most once an epoch, whoever is alive.
    ///
    /// # Errors
    /// If the text has fewer samples than one step needs.
    pub fn sampler(
        &self,
        config: &TrainerConfig,
        virtual_ranks: VirtualRanks,
    ) -> Result<Sampler, CorpusError> {
        let samples = ((self.text.len() - 1) / config.context) as u64;
        Sampler::new(config.seed, samples, config.batch as u64, virtual_ranks).ok_or_else(|| {
            CorpusError::Short {
                path: config.data.clone().unwrap_or_else(|| PathBuf::from("the bundled text")),
                found: self.text.len(),
                needed: virtual_ranks.count() as usize * config.batch * config.context + 1,
                context: config.context,
            }
        })
    }

    /// The samples of one leaf.
    #[must_use]
    pub fn batch(
        &self,
        config: &TrainerConfig,
        sampler: &Sampler,
        step: Step,
        virtual_rank: VirtualRank,
    ) -> Batch {
        let mut batch = Batch { inputs: Vec::new(), targets: Vec::new(), context: config.context };
        for sample in sampler.batch(step, virtual_rank) {
            let start = sample as usize * config.context;
            let sample = &self.text[start..=start + config.context];
            batch.inputs.extend_from_slice(&sample[..config.context]);
            batch.targets.extend_from_slice(&sample[1..]);
        }
        batch
    }
}

impl std::fmt::Debug for Corpus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Corpus")
            .field("bytes", &self.text.len())
            .field("digest", &self.digest)
            .finish()
    }
}

/// The samples of one leaf, one sequence after the other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Batch {
    /// What the model sees.
    pub inputs: Vec<u8>,
    /// For each input the byte that follows it.
    pub targets: Vec<u8>,
    /// Length of a sequence.
    pub context: usize,
}

/// Why there is no text to train on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CorpusError {
    /// A file or folder can't be read.
    #[error("can't read {}: {source}; give --data a text file or a folder that this host can read", path.display())]
    Read {
        /// Which one.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// There is neither a file nor a folder.
    #[error("{} is neither a file nor a folder; give --data a text file or a folder", path.display())]
    Kind {
        /// Which path.
        path: PathBuf,
    },
    /// Nothing but empty files.
    #[error("{} holds no text; give --data a file or folder with text, or leave it out for the bundled text", path.display())]
    Empty {
        /// Which path.
        path: PathBuf,
    },
    /// Not enough samples for one step.
    #[error("{} has {found} bytes, but --context {context} needs {needed}; give more text, or a shorter --context, --batch or fewer virtual ranks", path.display())]
    Short {
        /// Which path.
        path: PathBuf,
        /// How many bytes there are.
        found: usize,
        /// How many one sample needs.
        needed: usize,
        /// The context.
        context: usize,
    },
    /// More than fits in memory beside the model.
    #[error("{} has more than {max_bytes} bytes of text; give --data a part of it", path.display())]
    Large {
        /// Which path.
        path: PathBuf,
        /// The limit.
        max_bytes: u64,
    },
    /// Folders in folders without end.
    #[error("{} lies more than {max} folders deep; give --data a flatter folder", path.display())]
    Deep {
        /// Which folder.
        path: PathBuf,
        /// The limit.
        max: usize,
    },
}

impl CorpusError {
    /// What to do: the data or the path must change.
    #[must_use]
    pub fn remedy(&self) -> Remedy {
        Remedy::Stop
    }
}

fn read(path: &Path) -> Result<Vec<u8>, CorpusError> {
    // The path that the user gave may be a link; links found inside a folder are left out, so there are no circles.
    let kind = fs::metadata(path).map_err(unreadable(path))?;
    let mut files = Vec::new();
    if kind.is_dir() {
        list(path, 0, &mut files)?;
    } else if kind.is_file() {
        files.push(path.to_owned());
    } else {
        return Err(CorpusError::Kind { path: path.to_owned() });
    }
    files.sort();
    let mut text = Vec::new();
    for file in files {
        let room = CORPUS_MAX_BYTES + 1 - text.len() as u64;
        let opened = fs::File::open(&file).map_err(unreadable(&file))?;
        opened.take(room).read_to_end(&mut text).map_err(unreadable(&file))?;
        if text.len() as u64 > CORPUS_MAX_BYTES {
            return Err(CorpusError::Large { path: path.to_owned(), max_bytes: CORPUS_MAX_BYTES });
        }
    }
    Ok(text)
}

fn list(folder: &Path, depth: usize, files: &mut Vec<PathBuf>) -> Result<(), CorpusError> {
    if depth > DEPTH_MAX {
        return Err(CorpusError::Deep { path: folder.to_owned(), max: DEPTH_MAX });
    }
    for entry in fs::read_dir(folder).map_err(unreadable(folder))? {
        let entry = entry.map_err(unreadable(folder))?;
        let kind = entry.file_type().map_err(unreadable(&entry.path()))?;
        if kind.is_dir() {
            list(&entry.path(), depth + 1, files)?;
        } else if kind.is_file() {
            files.push(entry.path());
        }
    }
    Ok(())
}

fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> CorpusError {
    let path = path.to_owned();
    |source| CorpusError::Read { path, source }
}

/// This project's own design pages, frozen: 260 kB of English, so that a demonstration needs no download.
static BUNDLED: &[u8] = include_bytes!("../data/default.txt");
/// The whole text is held in memory by every worker of a host.
const CORPUS_MAX_BYTES: u64 = 1 << 30;
/// Deeper than any real tree of texts.
const DEPTH_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn config(data: Option<&Path>, context: usize) -> TrainerConfig {
        TrainerConfig {
            data: data.map(Path::to_owned),
            context,
            batch: 3,
            ..TrainerConfig::default()
        }
    }

    #[test]
    fn the_bundled_text_is_long_enough_to_learn_from() {
        let corpus = Corpus::load(&config(None, 64)).unwrap();
        assert!(corpus.text().len() >= 200_000);
        assert_eq!(corpus.digest(), Digest::of(corpus.text()));
    }

    #[test]
    fn a_folder_is_read_in_the_order_of_paths() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("b/deep")).unwrap();
        for (name, text) in
            [("c.txt", "three"), ("b/deep/x", "two"), ("a.txt", "one"), ("b/a", "half")]
        {
            fs::write(folder.path().join(name), text).unwrap();
        }
        #[cfg(unix)]
        std::os::unix::fs::symlink(folder.path(), folder.path().join("b/circle")).unwrap();
        let corpus = Corpus::load(&config(Some(folder.path()), 4)).unwrap();
        assert_eq!(corpus.text(), b"onehalftwothree");
        let file = Corpus::load(&config(Some(&folder.path().join("c.txt")), 4)).unwrap();
        assert_eq!(file.text(), b"three");
    }

    #[test]
    fn missing_empty_and_short_texts_say_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let message = |path: &Path| Corpus::load(&config(Some(path), 4)).unwrap_err().to_string();
        assert!(message(&folder.path().join("none")).contains("give --data a text file"));
        assert!(message(folder.path()).contains("holds no text"));
        let short = folder.path().join("short.txt");
        fs::write(&short, "four").unwrap();
        assert!(message(&short).contains("has 4 bytes, but --context 4 needs 5"));
        fs::write(&short, "fiver").unwrap();
        let corpus = Corpus::load(&config(Some(&short), 4)).unwrap();
        let one = TrainerConfig { batch: 1, ..config(None, 4) };
        let v = VirtualRanks::new(1).unwrap();
        let batch = corpus.batch(&one, &corpus.sampler(&one, v).unwrap(), Step(0), VirtualRank(0));
        assert_eq!((&batch.inputs[..], &batch.targets[..]), (&b"five"[..], &b"iver"[..]));
        let message = corpus.sampler(&one, VirtualRanks::new(2).unwrap()).unwrap_err().to_string();
        assert!(message.contains("fewer virtual ranks"), "{message}");
    }

    #[test]
    fn samples_are_decided_by_seed_step_and_virtual_rank() {
        let base = config(None, 16);
        let corpus = Corpus::load(&base).unwrap();
        let take = |config: &TrainerConfig, step, rank| {
            let sampler = corpus.sampler(config, VirtualRanks::new(4).unwrap()).unwrap();
            corpus.batch(config, &sampler, Step(step), VirtualRank(rank))
        };
        let first = take(&base, 0, 0);
        assert_eq!(first, take(&base, 0, 0));
        assert_eq!((first.inputs.len(), first.targets.len()), (48, 48));
        assert_eq!(first.inputs[1..16], first.targets[..15]);
        let other_seed = TrainerConfig { seed: 2, ..base.clone() };
        for other in [take(&base, 1, 0), take(&base, 0, 1), take(&other_seed, 0, 0)] {
            assert_ne!(first, other);
        }
    }
}
