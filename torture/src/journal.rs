//! The store's answers to each process, synced to disk before it goes on: the judge's evidence.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

/// One line of a journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// A store was opened or created, and is for this many writers (`many`, `single`).
    Opened(String),
    /// A save was acknowledged: id and step.
    Saved(String, u64),
    /// These are about to be retired.
    Retiring(Vec<String>),
    /// They were retired.
    Retired,
    /// From here on retention may retire what has this many newer checkpoints.
    Retention(u64),
    /// This one is about to be rebased.
    Rebasing(String),
    /// It was rebased.
    Rebased,
    /// A checkpoint was loaded and had the right values.
    Loaded(String),
    /// A sweep or a check finished.
    Kept,
    /// A call failed: what, and why. No promise was broken.
    Failed(String),
    /// The process itself saw a broken promise.
    Wrong(String),
}

impl Event {
    /// Whether this is the end of an operation, as opposed to its announcement.
    pub(crate) fn is_operation(&self) -> bool {
        !matches!(self, Self::Retiring(_) | Self::Retention(_) | Self::Rebasing(_) | Self::Wrong(_))
    }

    fn parse(line: &str) -> Option<Self> {
        let (verb, rest) = line.split_once(' ')?.1.split_once(' ')?;
        let text = || rest.to_owned();
        Some(match verb {
            "opened" => Self::Opened(text()),
            "saved" => {
                let (id, step) = rest.split_once(' ')?;
                Self::Saved(id.to_owned(), step.parse().ok()?)
            }
            "retiring" => Self::Retiring(rest.split(' ').map(str::to_owned).collect()),
            "retired" => Self::Retired,
            "retention" => Self::Retention(rest.parse().ok()?),
            "rebasing" => Self::Rebasing(text()),
            "rebased" => Self::Rebased,
            "loaded" => Self::Loaded(text()),
            "kept" => Self::Kept,
            "failed" => Self::Failed(text()),
            "wrong" => Self::Wrong(text()),
            _ => return None,
        })
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Opened(mode) => write!(f, "opened {mode}"),
            Self::Saved(id, step) => write!(f, "saved {id} {step}"),
            Self::Retiring(ids) => write!(f, "retiring {}", ids.join(" ")),
            Self::Retired => f.write_str("retired -"),
            Self::Retention(keep) => write!(f, "retention {keep}"),
            Self::Rebasing(id) => write!(f, "rebasing {id}"),
            Self::Rebased => f.write_str("rebased -"),
            Self::Loaded(id) => write!(f, "loaded {id}"),
            Self::Kept => f.write_str("kept -"),
            Self::Failed(why) => write!(f, "failed {}", one_line(why)),
            Self::Wrong(why) => write!(f, "wrong {}", one_line(why)),
        }
    }
}

fn one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

/// A journal being written. Several threads of a process may share it.
pub(crate) struct Journal(Mutex<File>);

impl Journal {
    /// Opens a journal to append to it.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self(Mutex::new(file)))
    }

    /// Writes a line with the time in milliseconds. It survives a kill once this returns.
    pub(crate) fn note(&self, event: &Event) -> io::Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let mut file = self.0.lock().unwrap_or_else(|e| e.into_inner());
        file.write_all(format!("{now} {event}\n").as_bytes())?;
        file.sync_data()
    }
}

/// All journals of a run, as text and as events.
#[derive(Default)]
pub(crate) struct Evidence {
    /// Each line with the name of its journal.
    lines: Vec<(String, String)>,
    /// The same as events.
    pub(crate) events: Vec<Event>,
}

impl Evidence {
    /// Reads every `*.journal` of a folder. An incomplete last line does not count.
    pub(crate) fn read(folder: &Path) -> io::Result<Self> {
        let mut paths: Vec<_> = std::fs::read_dir(folder)?.flatten().map(|e| e.path()).collect();
        paths.retain(|path| path.extension().is_some_and(|e| e == "journal"));
        paths.sort();
        let mut evidence = Self::default();
        for path in paths {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let text = std::fs::read_to_string(&path)?;
            for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
                evidence.events.extend(Event::parse(line));
                evidence.lines.push((name.clone(), line.to_owned()));
            }
        }
        Ok(evidence)
    }

    /// How many operations ended.
    pub(crate) fn operations(&self) -> usize {
        self.events.iter().filter(|e| e.is_operation()).count()
    }

    /// Acknowledged saves: id and step.
    pub(crate) fn saved(&self) -> impl Iterator<Item = (&str, u64)> {
        self.events.iter().filter_map(|e| match e {
            Event::Saved(id, step) => Some((id.as_str(), *step)),
            _ => None,
        })
    }

    /// How often a store was opened.
    pub(crate) fn opened(&self) -> usize {
        self.events.iter().filter(|e| matches!(e, Event::Opened(_))).count()
    }

    /// Calls that failed: what was called, and why it failed.
    pub(crate) fn failures(&self) -> impl Iterator<Item = &str> {
        self.events.iter().filter_map(|e| match e {
            Event::Failed(why) => Some(why.as_str()),
            _ => None,
        })
    }

    /// Checkpoints that some process said it would retire.
    pub(crate) fn retiring(&self) -> BTreeSet<&str> {
        let ids = self.events.iter().filter_map(|e| match e {
            Event::Retiring(ids) => Some(ids.iter().map(String::as_str)),
            _ => None,
        });
        ids.flatten().collect()
    }

    /// Checkpoints that some process said it would rebase.
    pub(crate) fn rebasing(&self) -> BTreeSet<&str> {
        let ids = self.events.iter().filter_map(|e| match e {
            Event::Rebasing(id) => Some(id.as_str()),
            _ => None,
        });
        ids.collect()
    }

    /// The fewest newer checkpoints that protect one from retention, if retention was used at all.
    pub(crate) fn retention(&self) -> Option<u64> {
        let keep = self.events.iter().filter_map(|e| match e {
            Event::Retention(keep) => Some(*keep),
            _ => None,
        });
        keep.min()
    }

    /// Broken promises that the processes themselves saw.
    pub(crate) fn wrong(&self) -> impl Iterator<Item = &str> {
        self.events.iter().filter_map(|e| match e {
            Event::Wrong(why) => Some(why.as_str()),
            _ => None,
        })
    }

    /// The lines that mention a word, with the names of their journals: its history.
    pub(crate) fn about(&self, word: &str) -> Vec<String> {
        let found = self.lines.iter().filter(|(_, line)| line.contains(word));
        found.map(|(name, line)| format!("{name}: {line}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{Event, Evidence, Journal};

    #[test]
    fn what_is_written_is_read_and_a_torn_line_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let events = [
            Event::Opened("many".into()),
            Event::Saved("a".into(), 3),
            Event::Retention(4),
            Event::Retiring(vec!["a".into(), "b".into()]),
            Event::Retired,
            Event::Rebasing("c".into()),
            Event::Failed("two\nlines".into()),
        ];
        let path = folder.path().join("w.journal");
        let journal = Journal::open(&path).unwrap();
        events.iter().for_each(|e| journal.note(e).unwrap());
        let mut torn = std::fs::read_to_string(&path).unwrap();
        torn.push_str("123 saved d 4");
        std::fs::write(&path, torn).unwrap();
        let read = Evidence::read(folder.path()).unwrap();
        assert_eq!(read.events[..6], events[..6]);
        assert_eq!(read.events[6], Event::Failed("two lines".into()));
        assert_eq!(read.saved().collect::<Vec<_>>(), [("a", 3)]);
        assert_eq!((read.retention(), read.operations()), (Some(4), 4));
        assert_eq!(read.about("retiring a").len(), 1);
    }
}
