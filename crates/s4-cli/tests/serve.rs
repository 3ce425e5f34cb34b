//! `s4w serve`, as a service manager runs it.

#![cfg(all(target_os = "linux", feature = "serve"))]
#![expect(clippy::unwrap_used, reason = "tests")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use s4weights::store::CheckpointStore;

const LONG: Duration = Duration::from_secs(60);

fn s4w(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_s4w"));
    command.current_dir(folder).arg("serve").args(args).stdout(Stdio::null());
    command.env_remove("S4W_STORE").env_remove("S4W_CONFIG").env_remove("S4_LOG");
    command
}

fn wait_for(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !is() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn get(address: &str, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}

fn end(mut child: Child) -> Option<i32> {
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-s", "TERM", &pid]).status().unwrap().success());
    child.wait().unwrap().code()
}

#[test]
fn a_safetensors_file_in_the_watched_folder_becomes_durable() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    std::fs::create_dir(folder.join("drop")).unwrap();
    let config =
        "min_free_bytes = 0\n[watch]\nfolder = \"drop\"\nremove = true\nsettle_seconds = 0\n";
    std::fs::write(folder.join("runner.toml"), config).unwrap();
    let args = ["--config", "runner.toml", "--state-dir", "state", "--socket", "s4w.sock"];
    let log = std::fs::File::create(folder.join("log")).unwrap();
    let mut command = s4w(folder, &args);
    let child = command.args(["--http", &address]).env("S4W_STORE", "store").stderr(log).spawn();
    let child = child.unwrap();
    wait_for("it listens", || get(&address, "/livez").is_some_and(|t| t.ends_with("ok\n")));
    let values: Vec<u8> = (0..4096u32).flat_map(|i| (i as f32).sqrt().to_le_bytes()).collect();
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![64, 64], &values);
    let file = safetensors::serialize([("w", view.unwrap())], None).unwrap();
    std::fs::write(folder.join("drop/model-step-30.safetensors"), file).unwrap();
    wait_for("it is taken", || std::fs::read_dir(folder.join("drop")).unwrap().count() == 0);
    let status = get(&address, "/v1/status").unwrap();
    assert!(status.contains("\"step\":30"), "{status}");
    assert_eq!(end(child), Some(0));
    let log = std::fs::read_to_string(folder.join("log")).unwrap();
    assert!(log.contains("all that was accepted is durable"), "{log}");
    let store = folder.join("store");
    let store =
        CheckpointStore::open(&store.to_string_lossy(), &Default::default(), Default::default());
    assert_eq!(store.unwrap().load(Some(30)).unwrap().reader().read("w").unwrap(), values);
}

#[test]
fn what_makes_no_sense_is_said_before_anything_listens() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    std::fs::write(folder.join("secret.toml"), "store = \"x\"\nnonsense = \"hush-hush\"\n")
        .unwrap();
    std::fs::write(folder.join("cut.toml"), "store = \"hush-hush").unwrap();
    let http = ["--store", "s", "--http", "nowhere"];
    let gpu = ["--store", "s", "--state-dir", "state", "--socket", "k", "--require-gpu"];
    for (args, code, said) in [
        (&[][..], 78, "`store` is missing"),
        (&http[..], 78, "`http`"),
        (&["--config", "gone.toml"][..], 78, "gone.toml"),
        (&["--config", "secret.toml"][..], 78, "nonsense"),
        (&["--config", "cut.toml"][..], 78, "line 1"),
        (&["--nonsense"][..], 2, "--nonsense"),
        (&gpu[..], 69, "a GPU is required"),
    ] {
        if code == 69 && Path::new("/dev/nvidiactl").exists() {
            continue;
        }
        let done = s4w(folder, args).output().unwrap();
        let text = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!(done.status.code(), Some(code), "{args:?}: {text}");
        assert!(text.contains(said) && !text.contains("hush-hush"), "{args:?}: {text}");
    }
    assert!(!folder.join("state").exists());
}
