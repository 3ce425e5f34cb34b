//! Writes the inputs to start from: `cargo run -p s4-fuzz-targets --example seeds -- fuzz/seeds`.

use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    let folder = PathBuf::from(std::env::args_os().nth(1).unwrap_or_else(|| "fuzz/seeds".into()));
    for (target, bytes) in s4_fuzz_targets::seeds::all() {
        let folder = folder.join(target);
        std::fs::create_dir_all(&folder)?;
        let name = s4_fuzz_targets::seeds::name(&bytes);
        std::fs::write(folder.join(name), bytes)?;
    }
    Ok(())
}
