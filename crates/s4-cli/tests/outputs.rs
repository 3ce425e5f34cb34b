//! `s4w` never damages files that it must not replace.
// `timeout` is a program of Linux.
#![cfg(target_os = "linux")]

use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Instant;

use safetensors::{Dtype, SafeTensors, tensor::TensorView};

/// Runs it with a time limit: it may wait for a pipe that nobody reads.
fn s4w(arguments: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    let command = command.args(["300", env!("CARGO_BIN_EXE_s4w")]).args(arguments);
    command.output().expect("the program starts")
}

fn text(out: &Output) -> String {
    String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr)
}

fn done(arguments: &[&str]) {
    let out = s4w(arguments);
    assert!(out.status.success(), "{arguments:?}: {}", text(&out));
}

/// A .safetensors file of a tensor `w`.
fn tensor(path: &str, dtype: Dtype, shape: &[usize], data: &[u8], metadata: &[(&str, &str)]) {
    let view = TensorView::new(dtype, shape.to_vec(), data).expect("as many bytes as values");
    let pairs = metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    let metadata = (!metadata.is_empty()).then(|| pairs.collect());
    safetensors::serialize_to_file([("w", view)], metadata, Path::new(path)).expect("written");
}

/// A folder with the .s4w file `a.s4w`, and what makes paths in it.
fn folder(values: usize) -> (tempfile::TempDir, impl Fn(&str) -> String) {
    let dir = tempfile::tempdir().expect("created");
    let root = dir.path().to_str().expect("plain names").to_owned();
    let path = move |name: &str| format!("{root}/{name}");
    let numbers = (0..values as u32).map(|i| i.wrapping_mul(0x9e37_79b9) >> 9 | 0x3c00_0000);
    let data: Vec<u8> = numbers.flat_map(u32::to_le_bytes).collect();
    tensor(&path("a.safetensors"), Dtype::F32, &[values], &data, &[]);
    done(&["compress", &path("a.safetensors"), &path("a.s4w")]);
    (dir, path)
}

fn pipe(path: &str) {
    assert!(Command::new("mkfifo").arg(path).status().expect("starts").success());
}

fn names(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).expect("a folder").map(|e| e.expect("an entry").file_name());
    let mut names: Vec<_> = names.map(|n| n.into_string().expect("plain names")).collect();
    names.sort();
    names
}

#[test]
fn a_transcoded_file_gets_its_name_once_it_was_compared() {
    let (dir, path) = folder(1000);
    // An output that cannot be read again is refused, and stays.
    pipe(&path("pipe"));
    symlink(path("pipe"), path("to-pipe")).unwrap();
    for output in [path("pipe"), path("to-pipe"), format!("file://{}", path("pipe"))] {
        let out = s4w(&["transcode", &path("a.s4w"), &output, "--force"]);
        assert_eq!(out.status.code(), Some(4), "{output}: {}", text(&out));
        assert!(text(&out).contains(&output), "{}", text(&out));
    }
    assert!(fs::symlink_metadata(path("pipe")).unwrap().file_type().is_fifo());
    // A link stays a link, and a file keeps its permissions.
    fs::write(path("old"), "mine").unwrap();
    fs::set_permissions(path("old"), PermissionsExt::from_mode(0o600)).unwrap();
    symlink("old", path("to-old")).unwrap();
    symlink("new", path("to-new")).unwrap();
    fs::write(path("any"), "").unwrap();
    let mode = |name| fs::metadata(path(name)).unwrap().permissions().mode() & 0o777;
    for (link, to, permissions) in [("to-old", "old", 0o600), ("to-new", "new", mode("any"))] {
        done(&["transcode", &path("a.s4w"), &path(link), "--force"]);
        assert_eq!(fs::read_link(path(link)).unwrap(), Path::new(to));
        done(&["verify", &path(to)]);
        assert_eq!(mode(to), permissions, "{to}");
    }
    let url = format!("file://{}", path("url.s4w"));
    done(&["transcode", &path("a.s4w"), &url]);
    // Errors are about the file that the user named.
    let out = s4w(&["transcode", &path("a.s4w"), &path("no/b.s4w")]);
    assert_eq!(out.status.code(), Some(3), "{}", text(&out));
    assert!(text(&out).contains("no/b.s4w: "), "{}", text(&out));
    let left = ["a.s4w", "a.safetensors", "any", "new", "old", "pipe", "to-new", "to-old"];
    assert_eq!(names(dir.path()), [&left[..], &["to-pipe", "url.s4w"]].concat());
}

#[test]
fn an_interrupted_transcode_leaves_the_old_file_or_the_new_one() {
    let (dir, path) = folder(16 << 20);
    let (from, to) = (path("a.s4w"), path("b.s4w"));
    fs::write(&to, "mine").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_s4w"));
    let command = command.args(["transcode", &from, &to, "--force", "--preset", "fast"]);
    let mut child = command.args(["--threads", "1"]).spawn().unwrap();
    // If it renamed the file before it compared it, stopping it then would lose the old file.
    let is_old = || fs::read(&to).is_ok_and(|bytes| bytes == b"mine");
    while is_old() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // It may be done already.
    let _ = Command::new("kill").args(["-s", "TERM", &child.id().to_string()]).output();
    child.wait().unwrap();
    assert!(is_old() || s4w(&["verify", &to]).status.success());
    assert_eq!(names(dir.path()), ["a.s4w", "a.safetensors", "b.s4w"]);
}

#[test]
fn a_safetensors_file_is_written_where_a_s4w_file_would_be() {
    let (dir, path) = folder(30_000);
    done(&["decompress", &path("a.s4w"), &path("b.safetensors")]);
    let plain = fs::read(path("b.safetensors")).unwrap();
    assert!(plain == fs::read(path("a.safetensors")).unwrap());
    // A pipe is written to.
    pipe(&path("pipe.safetensors"));
    let from = path("pipe.safetensors");
    let reader =
        std::thread::spawn(move || Command::new("timeout").args(["300", "cat", &from]).output());
    done(&["decompress", &path("a.s4w"), &path("pipe.safetensors")]);
    assert!(fs::symlink_metadata(path("pipe.safetensors")).unwrap().file_type().is_fifo());
    assert!(reader.join().unwrap().unwrap().stdout == plain);
    // A link that leads nowhere says where the file is to be.
    symlink("there", path("link.safetensors")).unwrap();
    done(&["decompress", &path("a.s4w"), &path("link.safetensors")]);
    assert!(fs::symlink_metadata(path("link.safetensors")).unwrap().is_symlink());
    assert!(fs::read(path("there")).unwrap() == plain);
    // A long name, of which the temporary name has a part.
    let long = format!("{}.safetensors", "\u{20ac}".repeat(80));
    done(&["decompress", &path("a.s4w"), &path(&long)]);
    // A file that may not be written to stays, whatever the folder allows.
    let protected = path("protected.safetensors");
    fs::write(&protected, "mine").unwrap();
    fs::set_permissions(&protected, PermissionsExt::from_mode(0o444)).unwrap();
    // Root may write to any.
    if File::options().write(true).open(&protected).is_err() {
        let out = s4w(&["decompress", &path("a.s4w"), &protected, "--force"]);
        assert_eq!(out.status.code(), Some(3), "{}", text(&out));
        assert!(text(&out).contains(&protected), "{}", text(&out));
        assert_eq!(fs::read(&protected).unwrap(), b"mine");
    }
    assert!(!names(dir.path()).iter().any(|name| name.starts_with('.')));
}

#[test]
fn a_folder_need_not_be_listed() {
    let (dir, path) = folder(1);
    let drop = path("drop");
    fs::create_dir(&drop).unwrap();
    fs::set_permissions(&drop, PermissionsExt::from_mode(0o333)).unwrap();
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    for name in ["a.safetensors", "a.s4w"] {
        fs::set_permissions(path(name), PermissionsExt::from_mode(0o644)).unwrap();
    }
    // Root may list any: then another user writes there, if one can be had.
    let by = |words: &[&str]| match fs::read_dir(&drop) {
        Err(_) => Some(s4w(words)),
        Ok(_) => {
            let program = path("s4w");
            // By a process of its own: a child that another test is just starting would have a copy of the descriptor
            // that is written to, and the program could not be started ("text file busy").
            let copied = Command::new("cp").args([env!("CARGO_BIN_EXE_s4w"), &program]).status();
            assert!(copied.unwrap().success());
            let mut command = Command::new("setpriv");
            command
                .args(["--reuid=65534", "--regid=65534", "--clear-groups", &program])
                .args(words);
            command.output().ok().filter(|out| !text(out).starts_with("setpriv: "))
        }
    };
    for words in [
        ["compress", &path("a.safetensors"), &path("drop/b.s4w")],
        ["decompress", &path("a.s4w"), &path("drop/b.safetensors")],
        ["transcode", &path("a.s4w"), &path("drop/c.s4w")],
    ] {
        let Some(out) = by(&words) else { return };
        assert!(out.status.success(), "{words:?}: {}", text(&out));
        assert!(Path::new(words[2]).exists());
    }
    fs::set_permissions(&drop, PermissionsExt::from_mode(0o755)).unwrap();
    assert_eq!(names(Path::new(&drop)), ["b.s4w", "b.safetensors", "c.s4w"]);
}

#[test]
fn a_full_standard_output_is_named() {
    let (_dir, path) = folder(1);
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_s4w"));
    let out = command.args(["inspect", &path("a.s4w")]).stdout(full).output().unwrap();
    assert_eq!(out.status.code(), Some(3));
    assert!(text(&out).starts_with("s4w: standard output: "), "{}", text(&out));
}

#[test]
fn an_output_has_a_name() {
    let (_dir, path) = folder(1);
    for words in [["compress", &path("a.safetensors"), ""], ["transcode", &path("a.s4w"), ""]] {
        let out = s4w(&words);
        assert_eq!(out.status.code(), Some(3), "{}", text(&out));
        assert!(text(&out).contains("no file name"), "{}", text(&out));
    }
}

#[test]
fn a_pipe_is_no_input() {
    let (dir, path) = folder(1);
    let (pipe_path, out_path) = (path("pipe"), path("out.safetensors"));
    pipe(&pipe_path);
    let (input, output) = (&pipe_path[..], &out_path[..]);
    let url = format!("file://{input}");
    for words in [
        &["compress", input, output][..],
        &["compress", "/dev/null", output],
        &["decompress", input, output],
        &["decompress", &url, output],
        &["transcode", input, output],
        &["inspect", input],
        &["verify", input],
    ] {
        let out = s4w(words);
        assert_eq!(out.status.code(), Some(2), "{words:?}: {}", text(&out));
        let said = text(&out);
        assert!(said.contains("a pipe or a device") && said.contains("name a file"), "{said}");
    }
    assert_eq!(names(dir.path()), ["a.s4w", "a.safetensors", "pipe"]);
}

#[test]
fn the_same_input_gives_the_same_file() {
    let (_dir, path) = folder(1);
    let empty = |i: usize| (format!("t{i}"), TensorView::new(Dtype::F32, vec![0, i], &[]).unwrap());
    let input = path("empty.safetensors");
    safetensors::serialize_to_file((0..20).map(empty), None, Path::new(&input)).unwrap();
    let files = [path("b.s4w"), path("c.s4w"), path("d.s4w")];
    let order = files.map(|output| {
        done(&["compress", &input, &output]);
        let out = text(&s4w(&["inspect", "--json", &output]));
        let report: serde_json::Value = serde_json::from_str(&out).unwrap();
        let tensors = report["tensors"].as_array().unwrap().clone();
        tensors.iter().map(|t| t["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    });
    assert_eq!(order[0].len(), 20);
    assert!(order[0].is_sorted() && order.iter().all(|o| *o == order[0]), "{order:?}");
}

#[test]
fn a_url_is_the_file_that_its_parser_finds() {
    let (dir, path) = folder(1000);
    let root = dir.path().to_str().expect("plain names");
    fs::write(path("b.s4w"), "mine").unwrap();
    let input = fs::read(path("a.s4w")).unwrap();
    for between in [r"\", "/no/../", "/%2e/"] {
        let url = |name: &str| format!("file://{root}{between}{name}.s4w");
        let out = s4w(&["compress", &path("a.safetensors"), &url("b")]);
        assert_eq!(out.status.code(), Some(5), "{}", text(&out));
        let out = s4w(&["transcode", &path("a.s4w"), &url("a"), "--force"]);
        assert_eq!(out.status.code(), Some(2), "{}", text(&out));
        assert!(text(&out).contains("the same file"), "{}", text(&out));
    }
    assert_eq!(fs::read(path("b.s4w")).unwrap(), b"mine");
    assert!(fs::read(path("a.s4w")).unwrap() == input);
}

#[test]
fn metadata_that_look_like_ours_change_no_tensor() {
    let (_dir, path) = folder(1);
    let round = |dtype, shape: &[usize], metadata: &[(&str, &str)]| {
        tensor(&path("b.safetensors"), dtype, shape, &[1, 2, 3, 4, 5, 6, 7, 8], metadata);
        let out = s4w(&["compress", &path("b.safetensors"), &path("b.s4w"), "--force"]);
        if !out.status.success() {
            return Err((out.status.code(), text(&out)));
        }
        done(&["decompress", &path("b.s4w"), &path("c.safetensors"), "--force"]);
        let bytes = fs::read(path("c.safetensors")).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let w = tensors.tensor("w").unwrap();
        assert_eq!((w.dtype(), w.shape(), w.data()), (dtype, shape, &[1, 2, 3, 4, 5, 6, 7, 8][..]));
        Ok(header.metadata().clone().unwrap_or_default())
    };
    for text in [r#"["I32",[2]]"#, r#"["F4",[16]]"#, r#"["U8",[8]]"#, "mine"] {
        for (dtype, shape) in [(Dtype::F32, &[2][..]), (Dtype::U8, &[8]), (Dtype::I16, &[2, 2])] {
            let metadata = round(dtype, shape, &[("safetensors.w", text)]).unwrap();
            assert_eq!(metadata["safetensors.w"], text);
        }
    }
    // A dtype that we lack has its place there, and comes back.
    let metadata = round(Dtype::F4, &[4, 4], &[("safetensors.v", "mine")]).unwrap();
    assert_eq!(metadata.len(), 1);
    let (code, said) = round(Dtype::F4, &[4, 4], &[("safetensors.w", "mine")]).unwrap_err();
    assert!(code == Some(4) && said.contains("`safetensors.w`"), "{said}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_tensor_that_memory_does_not_hold_is_an_error() {
    let (dir, path) = folder(1);
    let bytes = 1_u64 << 36;
    let header =
        format!(r#"{{"w":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    let large = path("large.safetensors");
    fs::write(&large, [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()).unwrap();
    // It has no blocks on the drive.
    File::options()
        .write(true)
        .open(&large)
        .unwrap()
        .set_len(8 + header.len() as u64 + bytes)
        .unwrap();
    let script = "ulimit -v 16000000; exec \"$0\" compress --threads 1 \"$1\"";
    let out = Command::new("sh").args(["-c", script, env!("CARGO_BIN_EXE_s4w"), &large]).output();
    let out = out.unwrap();
    assert_eq!(out.status.code(), Some(6), "{}", text(&out));
    assert!(text(&out).contains("no memory for") && text(&out).contains("`w`"), "{}", text(&out));
    assert_eq!(names(dir.path()), ["a.s4w", "a.safetensors", "large.safetensors"]);
}

/// Others may make a file while a command runs.
#[test]
fn a_file_that_appears_meanwhile_is_not_replaced() {
    let (dir, path) = folder(4 << 20);
    let (plain, ours) = (path("a.safetensors"), path("a.s4w"));
    for (command, input, output) in [
        ("compress", &plain, "b.s4w"),
        ("transcode", &ours, "c.s4w"),
        ("decompress", &ours, "d.safetensors"),
    ] {
        let out = path(output);
        for force in [false, true] {
            let ended = (0..8).find_map(|nth| {
                let _ = fs::remove_file(&out);
                let mut run = Command::new(env!("CARGO_BIN_EXE_s4w"));
                run.args([command, input, &out, "--threads", "1"]).args(force.then_some("--force"));
                let run = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
                // It has begun when there is a temporary name, which some file systems can do without.
                let (begun, most) = (Instant::now(), 200 >> nth);
                let is_new = |name: &String| name.starts_with('.');
                while !names(dir.path()).iter().any(is_new) && begun.elapsed().as_millis() < most {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                fs::write(&out, "mine").unwrap();
                let ended = run.wait_with_output().unwrap();
                let is_mine = fs::read(&out).unwrap() == b"mine";
                // If it had ended before the file appeared, that shows nothing.
                let too_late = is_mine && ended.status.success();
                (!too_late).then_some((ended, is_mine))
            });
            let (ended, is_mine) = ended.expect("a command that runs for a millisecond");
            let said = text(&ended);
            assert_eq!(is_mine, !force, "{command}: {said}");
            assert_eq!(ended.status.code(), Some(if force { 0 } else { 5 }), "{command}: {said}");
            assert!(force || said.contains(&format!("{out} exists already; --force")), "{said}");
        }
    }
    let left = ["a.s4w", "a.safetensors", "b.s4w", "c.s4w", "d.safetensors"];
    assert_eq!(names(dir.path()), left);
}
