//! The watched folder's content: files, and folders that `torch.distributed.checkpoint` writes.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD_NO_PAD;

use crate::record::Origin;

/// The file that makes a folder a checkpoint: PyTorch writes it last, under another name, and renames it.
const METADATA: &str = ".metadata";
/// The name of that file until it is complete.
const UNFINISHED: &str = ".metadata.tmp";
/// Prefix of the names of folders that are being removed.
const REMOVED: &str = ".s4w-removed-";
/// A folder with this many entries is not taken.
const MAX_FILES: usize = 100_000;

/// A file or folder that can be taken.
#[derive(Debug, Clone)]
pub(crate) struct Dropped {
    /// Where it is, and its size and times now.
    pub origin: Origin,
    /// What kind of checkpoint it is.
    pub kind: Kind,
}

/// The kinds of checkpoints in the watched folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A file of `torch.save`.
    Pickle,
    /// A `.safetensors` file.
    Safetensors,
    /// A folder of `torch.distributed.checkpoint`.
    Distributed {
        /// A data file newer than the metadata, which is written last: the folder is being rewritten.
        newer: Option<String>,
        /// An entry that is not part of the checkpoint: then the folder is not removed.
        foreign: Option<String>,
    },
}

/// The checkpoint at a path, if there may be one. Links are not followed, and hidden names are ignored.
pub(crate) fn look(path: &Path) -> Option<Dropped> {
    let name = path.file_name()?.to_string_lossy();
    if name.starts_with('.') {
        return None;
    }
    let about = fs::symlink_metadata(path).ok()?;
    let kind = match path.extension().and_then(|e| e.to_str()) {
        _ if about.is_dir() => return look_into(path, &about).ok().flatten(),
        Some("pt" | "pth" | "ckpt") => Kind::Pickle,
        Some("safetensors") => Kind::Safetensors,
        _ => return None,
    };
    let origin = Origin {
        path: path.to_path_buf(),
        len: about.len(),
        mtime_ns: changed_ns(&about),
        inode: about.ino(),
        files: None,
    };
    about.is_file().then_some(Dropped { origin, kind })
}

fn changed_ns(about: &Metadata) -> i64 {
    about.mtime().saturating_mul(1_000_000_000).saturating_add(about.mtime_nsec())
}

/// A folder, if it is complete.
fn look_into(path: &Path, about: &Metadata) -> io::Result<Option<Dropped>> {
    let (mut files, mut len, mut metadata_ns) = (vec![], 0_u64, None);
    let (mut newest, mut foreign) = (None, None);
    for entry in fs::read_dir(path)?.take(MAX_FILES) {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let file = entry.metadata()?;
        files.push(format!("{name}\0{}\0{}\0{}\n", file.len(), changed_ns(&file), file.ino()));
        len = len.saturating_add(file.len());
        match &*name {
            METADATA if file.is_file() => metadata_ns = Some(changed_ns(&file)),
            UNFINISHED => return Ok(None),
            name if file.is_file() && name.ends_with(".distcp") => {
                newest = newest.max(Some((changed_ns(&file), name.to_owned())));
            }
            _ => foreign = Some(name),
        }
    }
    let Some(mtime_ns) = metadata_ns.filter(|_| files.len() < MAX_FILES) else { return Ok(None) };
    files.sort();
    let listing = digest(&SHA256, files.concat().as_bytes());
    let origin = Origin {
        path: path.to_path_buf(),
        len,
        mtime_ns,
        inode: about.ino(),
        files: Some(BASE64_STANDARD_NO_PAD.encode(listing)),
    };
    let newer = newest.filter(|(ns, _)| *ns > mtime_ns).map(|(_, name)| name);
    Ok(Some(Dropped { origin, kind: Kind::Distributed { newer, foreign } }))
}

/// Removes a file or folder that was taken, unless it has changed since: then it is another checkpoint.
///
/// # Errors
/// Any I/O error; or the folder holds other files.
pub(crate) fn remove(taken: &Origin) -> io::Result<()> {
    let path = &taken.path;
    let Some(Dropped { origin, kind }) = look(path) else { return Ok(()) };
    if origin != *taken {
        return Ok(());
    }
    match kind {
        Kind::Pickle | Kind::Safetensors => fs::remove_file(path),
        Kind::Distributed { foreign: Some(name), .. } => {
            Err(io::Error::other(format!("{name} is in the folder but not part of the checkpoint")))
        }
        Kind::Distributed { .. } => remove_folder(taken),
    }
}

/// Gives the folder a hidden name first, so that a half-removed one never looks like a checkpoint.
fn remove_folder(taken: &Origin) -> io::Result<()> {
    let name = taken.path.file_name().unwrap_or_default().to_string_lossy();
    let hidden = taken.path.with_file_name(format!("{REMOVED}{name}"));
    fs::rename(&taken.path, &hidden)?;
    let renamed = look_into(&hidden, &fs::symlink_metadata(&hidden)?)?;
    if renamed.is_none_or(|now| {
        (now.origin.inode, now.origin.files) != (taken.inode, taken.files.clone())
    }) {
        return fs::rename(&hidden, &taken.path);
    }
    clear(&hidden)
}

/// Removes a hidden folder, beginning with the metadata that makes it a checkpoint. Fails if other
/// files are in it, which stay.
fn clear(hidden: &Path) -> io::Result<()> {
    match fs::remove_file(hidden.join(METADATA)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    for entry in fs::read_dir(hidden)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "distcp") {
            fs::remove_file(&path)?;
        }
    }
    fs::remove_dir(hidden)
}

/// Finishes the removals that a killed process left unfinished.
pub(crate) fn finish_removals(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let hidden = entry?.path();
        let name = hidden.file_name().unwrap_or_default().to_string_lossy();
        let Some(name) = name.strip_prefix(REMOVED) else { continue };
        let done = match hidden.join(METADATA).exists() {
            // Nothing was removed yet: restore the name, to look at the folder again.
            true => fs::rename(&hidden, folder.join(name)),
            false => clear(&hidden),
        };
        if let Err(e) = done {
            tracing::warn!(path = %hidden.display(), error = %e, "durable, but could not be removed");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::time::{Duration, SystemTime};

    /// A folder that looks like one of PyTorch's.
    fn folder() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("step_5");
        fs::create_dir(&path).unwrap();
        for name in ["__0_0.distcp", "__1_0.distcp", METADATA] {
            fs::write(path.join(name), name).unwrap();
        }
        (dir, path)
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_folder_is_a_checkpoint_once_its_metadata_are_there() {
        let (_dir, path) = folder();
        assert!(look(&path).is_some());
        fs::rename(path.join(METADATA), path.join(UNFINISHED)).unwrap();
        assert!(look(&path).is_none(), "not renamed yet");
        fs::write(path.join(METADATA), "the one before").unwrap();
        assert!(look(&path).is_none(), "it is being written again");
        fs::remove_file(path.join(UNFINISHED)).unwrap();
        assert!(look(&path).is_some());
        fs::remove_file(path.join(METADATA)).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", path.join(METADATA)).unwrap();
        assert!(look(&path).is_none(), "a link");
        let link = path.with_file_name("step_6");
        std::os::unix::fs::symlink(folder().1, &link).unwrap();
        assert!(look(&link).is_none(), "a link to a folder");
    }

    #[test]
    fn any_change_of_a_file_changes_a_folder() {
        let (_dir, path) = folder();
        let file = path.join("__1_0.distcp");
        let mut before = look(&path).unwrap().origin;
        let mut changed = |what: &str| {
            let now = look(&path).unwrap().origin;
            assert_ne!(std::mem::replace(&mut before, now.clone()), now, "{what}");
        };
        fs::write(&file, "longer than before").unwrap();
        changed("its size");
        let old = SystemTime::now() - Duration::from_secs(100);
        fs::File::options().write(true).open(&file).unwrap().set_modified(old).unwrap();
        changed("its time");
        fs::rename(&file, path.join("__2_0.distcp")).unwrap();
        changed("its name");
        fs::write(path.join("notes.txt"), "mine").unwrap();
        changed("another file");
        fs::create_dir(path.join("more")).unwrap();
        changed("another folder");
    }

    #[test]
    fn what_is_newer_than_the_metadata_is_told() {
        let (_dir, path) = folder();
        let later = SystemTime::now() + Duration::from_secs(100);
        let file = fs::File::options().write(true).open(path.join("__0_0.distcp")).unwrap();
        file.set_modified(later).unwrap();
        let Kind::Distributed { newer, foreign } = look(&path).unwrap().kind else { panic!() };
        assert_eq!((newer.as_deref(), foreign), (Some("__0_0.distcp"), None));
    }

    #[test]
    fn only_what_was_taken_is_removed() {
        let (dir, path) = folder();
        let taken = look(&path).unwrap().origin;
        fs::write(path.join("__0_0.distcp"), "written again").unwrap();
        remove(&taken).unwrap();
        assert_eq!(names(&path).len(), 3, "another checkpoint");
        let taken = look(&path).unwrap().origin;
        fs::write(path.join("tokenizer.json"), "mine").unwrap();
        let with_more = look(&path).unwrap().origin;
        remove(&taken).unwrap();
        assert!(remove(&with_more).unwrap_err().to_string().contains("tokenizer.json"));
        assert_eq!(names(&path).len(), 4);
        fs::remove_file(path.join("tokenizer.json")).unwrap();
        remove(&look(&path).unwrap().origin).unwrap();
        assert!(names(dir.path()).is_empty(), "{:?}", names(dir.path()));
        remove(&taken).unwrap();
    }

    #[test]
    fn a_removal_that_was_cut_short_is_finished_or_undone() {
        let (dir, path) = folder();
        let hidden = dir.path().join(format!("{REMOVED}step_5"));
        let taken = look(&path).unwrap().origin;
        // Killed right after the rename.
        fs::rename(&path, &hidden).unwrap();
        assert!(look(&hidden).is_none(), "it is hidden");
        finish_removals(dir.path()).unwrap();
        assert_eq!(look(&path).unwrap().origin, taken);
        // Killed in the middle.
        fs::rename(&path, &hidden).unwrap();
        fs::remove_file(hidden.join(METADATA)).unwrap();
        fs::remove_file(hidden.join("__1_0.distcp")).unwrap();
        finish_removals(dir.path()).unwrap();
        assert!(names(dir.path()).is_empty(), "{:?}", names(dir.path()));
    }
}
