//! What `s4w` prints, where, and which characters it keeps from the terminal.

#![cfg(unix)]

mod in_time;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Output};

use in_time::in_time;

use s4weights::store::{CheckpointStore, SaveOptions, StoreOptions};
use s4weights::{Contents, DType, Target, TensorSource, WriteOptions, Writer};

/// Clears the screen, rings, reverses the direction of writing, and begins a line.
const EVIL: &str = "evil\u{1b}[2J\u{9b}31m\u{7}\u{202e}\nDAMAGED   step 7";

fn s4w(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_s4w"));
    command.args(arguments).env_remove("S4_LOG");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn all(out: &Output) -> String {
    text(&out.stdout) + &text(&out.stderr)
}

fn contents() -> Contents {
    Contents { metadata: [(EVIL.to_owned(), EVIL.to_owned())].into(), ..Contents::default() }
}

#[test]
fn names_give_no_orders_to_a_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let (file, url) = (dir.path().join("a.s4w"), dir.path().join("store"));
    let (file, url) = (file.to_str().unwrap(), url.to_str().unwrap());
    let data = vec![7; 40_000];
    let tensors = [TensorSource::new(EVIL, DType::Float32, &[10_000], &data)];
    let mut writer = Writer::create(Target::from(file), WriteOptions::default()).unwrap();
    writer.write(&tensors).unwrap();
    writer.finish(contents()).unwrap();
    let store = CheckpointStore::create(url, &Default::default(), StoreOptions::default()).unwrap();
    let options = SaveOptions {
        metrics: [(EVIL.to_owned(), 1.0)].into(),
        tags: [(EVIL.to_owned(), EVIL.to_owned())].into(),
        contents: contents(),
        ..SaveOptions::default()
    };
    store.save(3, &tensors, &options).unwrap();
    for (arguments, shows) in [
        (&["inspect", file][..], true),
        (&["inspect", file, "--json"], true),
        (&["verify", file], false),
        (&["store", "ls", url], false),
        (&["store", "ls", url, "--json"], true),
        (&["store", "show", url, "latest"], true),
        (&["store", "show", url, "latest", "--json"], true),
        (&["store", "log", url, "--json"], true),
        (&["store", "verify", url], false),
        (&["store", "retire", url, "3", "--reason", EVIL], false),
        (&["store", "log", url], true),
        (&["inspect", EVIL], true),
    ] {
        let out = all(&s4w(arguments).output().unwrap());
        let orders = |c: char| c != '\n' && (c.is_control() || c == '\u{202e}');
        assert!(!out.contains(orders), "{arguments:?}: {out:?}");
        assert!(!out.lines().any(|line| line.starts_with("DAMAGED")), "{arguments:?}: {out}");
        assert_eq!(out.contains("evil"), shows, "{arguments:?}: {out}");
        if arguments.contains(&"--json") {
            let value: serde_json::Value = serde_json::from_str(&out).unwrap();
            let unescaped = format!("{value:?}");
            assert!(unescaped.contains("202e"), "{unescaped}");
        }
    }
}

/// An address where nobody listens, with a port that nobody is given.
const NOBODY: &str = "endpoint_url=http://127.0.0.1:1";

#[test]
fn troubles_are_told_on_standard_error_until_time_is_up() {
    let list = |seconds: &str, log: &str| {
        let place = ["store", "ls", "s3://bucket/x", "-o", NOBODY, "-o", "key=AKIDHUSH"];
        let more = ["-o", "secret=hush", "--json", "--timeout", seconds];
        s4w(&[&place[..], &more].concat()).env("S4_LOG", log).output().unwrap()
    };
    let (told, untold) = in_time(11.0, || {
        std::thread::scope(|scope| {
            let untold = scope.spawn(|| list("8", "off"));
            (list("8", ""), untold.join().unwrap())
        })
    });
    for (out, warned) in [(told, true), (untold, false)] {
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(3), "{said}");
        assert!(out.stdout.is_empty(), "{}", text(&out.stdout));
        assert_eq!(said.contains("WARN") && said.contains("trying again"), warned, "{said}");
        assert!(said.contains("connection refused") && said.contains("start the server"), "{said}");
        assert!(!said.contains("hush") && !said.contains("HUSH"), "{said}");
    }
    in_time(3.0, || list("0.5", "warn"));
    let wrong = list("1", "loud");
    assert_eq!(wrong.status.code(), Some(2), "{}", all(&wrong));
    assert!(text(&wrong.stderr).contains("S4_LOG"));
    assert_eq!(list("-1", "").status.code(), Some(2));
}

#[test]
fn every_verb_keeps_to_the_timeout() {
    let file = std::env::temp_dir().join(format!("s4w-{}.svg", std::process::id()));
    let file = file.to_str().unwrap();
    let keeps = |verb: &&[&str]| {
        let place = ["s3://bucket/x", "--timeout", "2", "-o", NOBODY, "-o", "key=k"];
        let arguments = [&["store", verb[0]], &place[..1], &verb[1..], &place[1..]].concat();
        let arguments = [&arguments[..], &["-o", "secret=s", "-o", "region=r"]].concat();
        // Half a minute is usual.
        let out = in_time(8.0, || s4w(&arguments).output().unwrap());
        assert_eq!(out.status.code(), Some(3), "{arguments:?}: {}", all(&out));
        assert!(all(&out).contains("connection refused"), "{arguments:?}: {}", all(&out));
    };
    let verbs = [
        &["init"][..],
        &["ls"],
        &["show"],
        &["log"],
        &["verify"],
        &["repair"],
        &["probe"],
        &["gc"],
        &["gc", "--dry-run"],
        &["retire", "--keep-last", "1"],
        &["restore", "latest", file],
        &["plot", file],
    ];
    std::thread::scope(|scope| {
        let keeps = &keeps;
        verbs.iter().for_each(|verb| drop(scope.spawn(move || keeps(verb))));
    });
}

#[test]
fn secrets_in_urls_are_not_repeated() {
    for url in
        ["s3://AKIDHUSH:hush@b/x", "s3://AKIDHUSH:hu/hush@b/x", "s3://b/x?X-Amz-Signature=hush"]
    {
        for arguments in [
            &["inspect", url][..],
            &["verify", url],
            &["store", "ls", url],
            &["store", "probe", url],
            &["store", "init", url],
            &["store", "gc", url],
        ] {
            let out = s4w(arguments).output().unwrap();
            let said = all(&out);
            assert_eq!(out.status.code(), Some(2), "{arguments:?}: {said}");
            assert!(!said.contains("hush") && !said.contains("AKIDHUSH"), "{arguments:?}: {said}");
        }
    }
}

#[test]
fn variables_that_are_no_text_are_passed_over_or_named() {
    let run = |name: &str| {
        let bad = OsStr::from_bytes(b"\xff\xfe");
        let mut command = s4w(&["inspect", "s3://bucket/x", "--timeout", "2"]);
        command.env(name, bad).env("AWS_ENDPOINT_URL", "http://127.0.0.1:1");
        command.env("AWS_SECRET_ACCESS_KEY", "s").env("AWS_REGION", "r");
        if name != "AWS_ACCESS_KEY_ID" {
            command.env("AWS_ACCESS_KEY_ID", "k");
        }
        command.output().unwrap()
    };
    let out = run("SOMEBODY_ELSES");
    assert_eq!(out.status.code(), Some(3), "{}", all(&out));
    assert!(all(&out).contains("connection refused"), "{}", all(&out));
    let out = run("AWS_ACCESS_KEY_ID");
    assert_eq!(out.status.code(), Some(2), "{}", all(&out));
    assert!(all(&out).contains("`AWS_ACCESS_KEY_ID`"), "{}", all(&out));
}

#[test]
fn long_names_and_permissions_are_those_of_other_programs() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.s4w");
    let data = vec![7; 4000];
    let mut writer = Writer::create(Target::from(file.as_path()), WriteOptions::default()).unwrap();
    let shape = [1000];
    writer.write(&[TensorSource::new("a", DType::Float32, &shape, &data)]).unwrap();
    writer.finish(Contents::default()).unwrap();
    let long = dir.path().join(format!("{}.safetensors", "x".repeat(243)));
    let decompress = || {
        let out = s4w(&["decompress", "-f", file.to_str().unwrap(), long.to_str().unwrap()])
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", all(&out));
    };
    decompress();
    std::fs::set_permissions(&long, std::fs::Permissions::from_mode(0o606)).unwrap();
    decompress();
    assert_eq!(std::fs::metadata(&long).unwrap().permissions().mode() & 0o777, 0o606);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
}
