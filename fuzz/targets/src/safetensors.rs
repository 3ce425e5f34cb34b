//! Importing a `.safetensors` file, as `s4w compress` does, and exporting it again.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::memory::bounded;

/// A file of these bytes, either behind the correct length of its header, or with the length that
/// the bytes themselves give.
pub fn safetensors(data: &[u8]) {
    let Some((&how, rest)) = data.split_first() else { return };
    let file = match how & 1 {
        0 => rest.to_vec(),
        _ => {
            // The header ends where the last brace is.
            let header = rest.iter().rposition(|b| *b == b'}').map_or(rest.len(), |at| at + 1);
            [&(header as u64).to_le_bytes()[..], rest].concat()
        }
    };
    let names = ["in.safetensors", "out.s4w", "back.safetensors"].map(place);
    let [input, output, back] = &names;
    assert!(std::fs::write(input, &file).is_ok(), "{}", input.display());
    let command = |verb: &str, from: &PathBuf, to: &PathBuf| {
        let words = ["s4w", verb, "--quiet", "--threads", "1"].map(OsString::from);
        let paths = [from, to].map(|p| p.clone().into_os_string());
        s4_cli::run(words.into_iter().chain(paths))
    };
    // Parsed JSON takes a multiple of the memory of its text.
    let asked = 64 * file.len();
    if bounded(file.len(), asked, || command("compress", input, output)) == 0 {
        let code = bounded(file.len(), asked, || command("decompress", output, back));
        assert_eq!(code, 0, "what was imported cannot be exported");
    }
    for path in &names {
        let _ = std::fs::remove_file(path);
    }
}

/// A file of this process, in memory if the machine has such a place.
fn place(name: &str) -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    let folder = if memory.is_dir() { memory } else { std::env::temp_dir() };
    folder.join(format!("s4-fuzz-{}-{name}", std::process::id()))
}
