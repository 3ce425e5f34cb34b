//! `s4w store`, run as its users run it, on local folders.

mod in_time;

use std::path::Path;
use std::process::{Command, Output};

use s4weights::store::{CheckpointStore, SaveOptions, StoreOptions};
use s4weights::{Contents, DType, TensorSource};
use serde_json::Value;

/// Names and values of the tensors; `step` decides how far training has changed the values.
fn tensors(step: u64) -> Vec<(String, Vec<u8>)> {
    let names = ["model.blocks.0.up", "model.blocks.1.up", "optimizer.0.exp_avg_sq"];
    let value = |i: u32, t: usize| {
        // A number with noise in its last bits, of which each step changes a few more.
        let noise = (i ^ (t as u32) << 20).wrapping_mul(0x9e37_79b9);
        let moved = noise >> (32 - step.min(8) as u32).min(31);
        f32::from_bits((0x3c00_0000 | (noise & 0x01ff_ffff)) ^ moved)
    };
    let data = |t: usize| (0..30_000u32).flat_map(|i| value(i, t).to_le_bytes()).collect();
    names.iter().enumerate().map(|(t, name)| ((*name).to_owned(), data(t))).collect()
}

fn save(store: &CheckpointStore, step: u64) {
    let values = tensors(step);
    let sources: Vec<_> = values
        .iter()
        .map(|(name, data)| TensorSource::new(name, DType::Float32, &[300, 100], data))
        .collect();
    let options = SaveOptions {
        metrics: [("loss".to_owned(), 10.0 - step as f64)].into(),
        tags: [("run".to_owned(), "a".to_owned())].into(),
        contents: Contents {
            metadata: [("who".to_owned(), "me".to_owned())].into(),
            ..Contents::default()
        },
        ..SaveOptions::default()
    };
    store.save(step, &sources, &options).expect("saved");
}

/// A store of steps 0 to 4, chains of three at most: 0 and 3 are bases.
fn filled(folder: &Path) -> String {
    let url = folder.join("runs").to_str().expect("plain names").to_owned();
    let options =
        StoreOptions { max_chain: 3, max_hops: 2, threads: Some(2), ..StoreOptions::default() };
    let store = CheckpointStore::create(&url, &Default::default(), options).expect("created");
    (0..5).for_each(|step| save(&store, step));
    url
}

fn s4w(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_s4w"));
    command.arg("store").args(arguments).output().expect("the program starts")
}

fn said(arguments: &[&str], code: i32) -> String {
    let out = s4w(arguments);
    let text =
        String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{arguments:?}: {text}");
    text
}

fn json(arguments: &[&str]) -> Value {
    let out = s4w(&[arguments, &["--json"]].concat());
    let text = String::from_utf8_lossy(&out.stdout);
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{arguments:?}: {e}: {text}"))
}

fn steps(url: &str) -> Vec<u64> {
    let list = json(&["ls", url]);
    let list = list.as_array().expect("a list");
    list.iter().filter_map(|c| c["step"].as_u64()).collect()
}

#[test]
fn listings_tell_what_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let url = filled(dir.path());
    let text = said(&["ls", &url], 0);
    assert!(
        text.contains("delta of 0") && text.contains("5 checkpoints (2 bases, 3 deltas)"),
        "{text}"
    );
    let list = json(&["ls", &url, "-n", "2"]);
    assert_eq!(list.as_array().unwrap().len(), 2);
    assert_eq!((&list[0]["kind"], &list[1]["kind"]), (&"base".into(), &"delta".into()));
    assert_eq!((&list[1]["of_step"], &list[1]["chain"]), (&3.into(), &2.into()));
    assert_eq!((&list[1]["hops"], &list[1]["since_base"]), (&1.into(), &1.into()));
    assert_eq!((&list[1]["metrics"]["loss"], &list[1]["tags"]["run"]), (&6.0.into(), &"a".into()));
    assert!(list[1]["bytes"].as_u64().unwrap() < list[1]["raw_bytes"].as_u64().unwrap());

    let text = said(&["show", &url], 0);
    assert!(text.contains("any number at once") && text.contains("latest    step 4"), "{text}");
    assert_eq!(json(&["show", &url])["checkpoints"], 5);
    let text = said(&["show", &url, "2", "--bits"], 0);
    assert!(
        text.contains("chain     3 checkpoints: 2, 1, 0") && text.contains("model.blocks.0.up"),
        "{text}"
    );
    let shown = json(&["show", &url, "0"]);
    assert_eq!(shown["needed_by"], serde_json::json!([1]));
    assert_eq!(shown["content"]["metadata"]["who"], "me");
    let by_id = json(&["show", &url, shown["id"].as_str().unwrap()]);
    assert_eq!(by_id["step"], 0);

    let log = json(&["log", &url, "--from", "4"]);
    assert_eq!((log.as_array().unwrap().len(), &log[0]["n"]), (2, &4.into()));
    assert!(said(&["log", &url], 0).contains("publish"));
}

#[test]
fn a_step_is_restored_bit_by_bit() {
    let dir = tempfile::tempdir().unwrap();
    let url = filled(dir.path());
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    for step in 0..5u64 {
        let which = if step == 4 { "latest".to_owned() } else { step.to_string() };
        said(&["restore", &url, &which, &path("a.s4w"), "-qf", "--threads", "2"], 0);
        let reader = s4weights::Reader::open(path("a.s4w").as_str().into(), Default::default());
        let reader = reader.unwrap();
        assert_eq!(reader.manifest().metadata["who"], "me");
        assert!(reader.manifest().parent.is_none());
        said(&["restore", &url, &which, &path("a.safetensors"), "--quiet", "--force"], 0);
        let bytes = std::fs::read(path("a.safetensors")).unwrap();
        let plain = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (name, data) in tensors(step) {
            assert!(reader.read(&name).unwrap() == data, "{step} {name}");
            assert!(plain.tensor(&name).unwrap().data() == data, "{step} {name}");
        }
    }
    for name in ["a.s4w", "a.safetensors"] {
        let before = std::fs::read(path(name)).unwrap();
        let text = said(&["restore", &url, "0", &path(name)], 5);
        assert!(text.contains(name) && text.contains("--force"), "{text}");
        assert!(std::fs::read(path(name)).unwrap() == before);
    }
    let text = said(&["restore", &url, "1", &path("a.pt")], 4);
    assert!(text.contains("Python wheel"), "{text}");
    assert!(!dir.path().join("a.pt").exists());
}

#[test]
fn what_is_needed_stays_until_it_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let url = filled(dir.path());
    assert!(said(&["retire", &url, "--keep-last", "0"], 2).contains("--keep-last"));
    assert!(said(&["retire", &url, "--keep-best", "loss:0:min"], 2).contains("COUNT"));
    let text = said(&["retire", &url, "1"], 5);
    assert!(text.contains("step 1 is needed by step 2") && text.contains("rebase"), "{text}");
    said(&["pin", &url, "0"], 0);
    assert!(said(&["ls", &url], 0).contains("pinned"));
    assert!(said(&["retire", &url, "0", "1", "2"], 5).contains("step 0 is pinned"));
    assert!(said(&["unpin", &url, "0"], 0).contains("not pinned"));

    let done = json(&["rebase", &url, "2", "--quiet"]);
    assert_eq!((&done["step"], &done["changed"]), (&2.into(), &true.into()));
    assert_eq!(json(&["rebase", &url, "2"])["changed"], false);
    let plan = json(&["retire", &url, "0", "1", "--dry-run"]);
    assert_eq!((plan["retired"].as_array().unwrap().len(), steps(&url).len()), (2, 5));
    let text = said(&["retire", &url, "0", "1", "--reason", "old"], 0);
    assert!(text.contains("retired steps 0, 1; 3 checkpoints left"), "{text}");
    assert_eq!(steps(&url), [2, 3, 4]);
    assert!(said(&["log", &url], 0).contains("(old)"));

    let text = said(&["gc", &url, "--grace", "1h"], 2);
    assert!(text.contains("--exclusive"), "{text}");
    assert!(json(&["gc", &url])["deleted"].as_array().unwrap().is_empty());
    let plan = json(&["gc", &url, "--grace", "0s", "--exclusive", "--dry-run"]);
    let gone = json(&["gc", &url, "--grace", "0s", "--exclusive"]);
    // Steps 0 and 1, and step 2 as it was before its rebase.
    assert_eq!(gone["deleted"].as_array().unwrap().len(), 3);
    assert_eq!(plan["deleted_bytes"], gone["deleted_bytes"]);
    said(&["verify", &url, "--read-data", "-q"], 0);

    let kept = json(&["retire", &url, "--keep-best", "loss:1:max", "--keep-last", "1"]);
    assert_eq!(kept["kept"], 3, "the best, the newest, and the base that the newest needs");
    assert_eq!(steps(&url), [2, 3, 4]);
    // A reason is kept for what rules retire, too.
    let by_rule = ["retire", &url, "--keep-last", "1", "--reason", "by rule"];
    said(&[&by_rule[..], &["--dry-run"]].concat(), 0);
    assert_eq!(steps(&url), [2, 3, 4]);
    said(&by_rule, 0);
    assert_eq!(steps(&url), [3, 4]);
    assert!(said(&["log", &url], 0).contains("(by rule)"));
    assert!(said(&by_rule, 0).contains("nothing to retire"));
}

#[test]
fn damage_is_found_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let url = filled(dir.path());
    assert_eq!(json(&["verify", &url])["sound"], true);
    let id = json(&["show", &url, "0"])["id"].as_str().unwrap().to_owned();
    let object = Path::new(&url).join("ck").join(id).join("d-0");
    let mut bytes = std::fs::read(&object).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    std::fs::write(&object, &bytes).unwrap();
    // The sizes are still right.
    said(&["verify", &url], 0);
    let text = said(&["verify", &url, "--read-data"], 1);
    assert!(text.contains("DAMAGED   step 0") && text.contains("NOT SOUND"), "{text}");
    let report = json(&["verify", &url, "--read-data"]);
    assert_eq!(report["sound"], false);
    let text = said(&["restore", &url, "0", dir.path().join("a.s4w").to_str().unwrap()], 1);
    assert!(text.contains("step 0") && text.contains("tensor `"), "{text}");
    assert!(!dir.path().join("a.s4w").exists());
    // Step 3 is a base of its own.
    said(&["verify", &url, "3", "4", "--read-data"], 0);
    std::fs::remove_file(&object).unwrap();
    let text = said(&["verify", &url], 1);
    assert!(text.contains("UNUSABLE  step 2: needs step 0"), "{text}");
    // Each step once, at the end.
    assert!(text.contains("\nrestores: 3, 4\ndoes NOT restore: 0, 1, 2"), "{text}");
}

#[test]
fn a_damaged_log_is_read_and_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let url = filled(dir.path());
    assert!(said(&["repair", &url], 0).contains("nothing to repair"));
    let entry = Path::new(&url).join("log/00000000000000000005");
    let good = std::fs::read(&entry).unwrap();
    std::fs::write(&entry, b"").unwrap();
    let text = said(&["ls", &url], 0);
    assert_eq!(text.matches("entry 5").count(), 1, "one warning: {text}");
    assert!(
        text.contains("WARN the log is damaged") && text.contains("s4w store repair"),
        "{text}"
    );
    assert_eq!(steps(&url), [0, 1, 2, 3]);
    let text = said(&["retire", &url, "0"], 1);
    assert!(text.contains("s4w store repair") && text.contains("entry 5"), "{text}");
    let text = said(&["verify", &url], 1);
    assert!(text.contains("DAMAGED   the log") && text.contains("restores: 0, 1, 2, 3"), "{text}");
    // Not that no step is lost: nobody knows what entry 5 said.
    assert!(
        text.contains("does NOT restore: no listed step\nNOT KNOWN: the contents of entry 5"),
        "{text}"
    );
    assert!(text.contains("that no entry names"), "{text}");
    let report = json(&["verify", &url]);
    assert_eq!(
        (&report["lost"][0]["entry"], &report["lost"][0]["step"]),
        (&5.into(), &Value::Null)
    );
    let id = report["unnamed"][0]["id"].as_str().unwrap();
    assert!(text.contains(&format!("the step of {id} (")), "{text}");
    let quiet = s4w(&["verify", &url, "-q"]);
    let told = String::from_utf8_lossy(&quiet.stderr);
    assert!(!told.contains("entry 5"), "no warning: {told}");
    assert!(said(&["repair", &url], 0).contains("--apply"));
    assert!(std::fs::read(&entry).unwrap().is_empty());
    let done = json(&["repair", &url, "--apply"]);
    assert_eq!((&done["applied"], &done["fenced"]), (&true.into(), &vec![5].into()));
    let aside = Path::new(&url).join(done["aside"].as_str().unwrap());
    assert!(aside.join("log/00000000000000000005").is_file() && !good.is_empty());
    said(&["verify", &url, "--read-data"], 0);
    assert_eq!(steps(&url), [0, 1, 2, 3]);
}

#[test]
fn a_delta_of_a_lost_step_is_named_as_lost() {
    let dir = tempfile::tempdir().unwrap();
    let url = filled(dir.path());
    // Step 1, which step 2 is a delta of.
    std::fs::write(Path::new(&url).join("log/00000000000000000002"), b"").unwrap();
    let text = said(&["verify", &url], 1);
    assert!(text.contains("\nrestores: 0, 3, 4\ndoes NOT restore: no listed step\n"), "{text}");
    assert!(
        text.contains("\nlost from the log: 2 (")
            && text.contains("NOT KNOWN: the contents of entry 2"),
        "{text}"
    );
    let lost = json(&["verify", &url])["lost"].clone();
    assert!(lost.as_array().unwrap().iter().any(|l| l["step"] == 2), "{lost}");
}

#[test]
fn what_was_retired_is_listed_again() {
    let dir = tempfile::tempdir().unwrap();
    let url = filled(dir.path());
    said(&["retire", &url, "3", "4"], 0);
    assert_eq!(steps(&url), [0, 1, 2]);
    let text = said(&["unretire", &url, "4"], 0);
    assert!(text.contains("step 3 is listed again") && text.contains("step 4"), "{text}");
    assert_eq!(steps(&url), [0, 1, 2, 3, 4]);
    said(&["verify", &url, "--read-data"], 0);
    assert!(said(&["log", &url], 0).contains("unretire"));
    said(&["retire", &url, "3", "4"], 0);
    said(&["gc", &url, "--grace", "0s", "--exclusive"], 0);
    assert!(said(&["unretire", &url, "4"], 5).contains("given up"));
    assert!(said(&["unretire", &url, "77"], 3).contains("77"));
    // A metric that no checkpoint has keeps everything.
    let text = said(&["retire", &url, "--keep-best", "los:1:max"], 2);
    assert!(text.contains("`los`") && text.contains("loss"), "{text}");
    assert_eq!(steps(&url), [0, 1, 2]);
}

#[test]
fn a_store_is_created_once() {
    let dir = tempfile::tempdir().unwrap();
    let url = dir.path().join("new").to_str().unwrap().to_owned();
    assert!(said(&["ls", &url], 3).contains("`s4w store init"));
    assert!(said(&["probe", &url], 0).contains("several writers are safe"));
    assert_eq!(json(&["probe", &url])["survives_races"], true);
    let nothing = format!("{url}-nothing");
    assert!(said(&["probe", &nothing], 0).contains("several writers are safe"));
    assert!(!Path::new(&nothing).exists());
    assert!(said(&["init", &url, "--writers", "few"], 2).contains("`single`"));
    assert!(said(&["init", &url], 0).contains("any number at once"));
    assert!(said(&["probe", &url, "--allow-many"], 0).contains("already"));
    assert!(said(&["break-lease", &url], 2).contains("no lease"));
    assert!(said(&["init", &url], 5).contains("already"));
    assert!(said(&["ls", &url], 0).contains("no checkpoints"));
    assert!(said(&["show", &url, "latest"], 3).contains("is empty"));
    assert!(said(&["plot", &url, dir.path().join("a.svg").to_str().unwrap()], 3).contains("draw"));
}

#[test]
fn a_store_for_one_writer_is_opened_to_many() {
    let dir = tempfile::tempdir().unwrap();
    let url = dir.path().join("one").to_str().unwrap().to_owned();
    assert!(said(&["init", &url, "--writers", "single"], 0).contains("one at a time"));
    assert!(said(&["show", &url], 0).contains("one at a time"));
    let leases = || std::fs::read_dir(dir.path().join("one/lease")).unwrap().count();
    assert_eq!(leases(), 0, "whoever is done gives the lease back");
    // What a killed process leaves.
    let lease = dir.path().join("one/lease/held-01890000-0000-7000-8000-000000000000");
    std::fs::write(&lease, r#"{"host":"a\u001bb","pid":77,"since_ms":0}"#).unwrap();
    assert!(said(&["break-lease", &url], 0).contains("process 77 on ab (since 1970"));
    assert!(said(&["break-lease", &url], 0).contains("no lease to remove"));
    assert!(said(&["probe", &url], 0).contains("--allow-many"));
    assert!(said(&["probe", &url, "--allow-many"], 0).contains("now allows any number of writers"));
    assert!(said(&["show", &url], 0).contains("any number at once"));
    assert_eq!(leases(), 0);
}

#[test]
fn wrong_arguments_are_told_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let url = filled(dir.path());
    assert!(said(&["show", &url, "7"], 3).contains("the nearest is 4"));
    assert!(said(&["show", &url, "newest"], 2).contains("`latest`"));
    for verb in [&["ls", &url][..], &["plot", &url, "a.svg"]] {
        let text = said(&[verb, &["-n", "0"]].concat(), 2);
        assert!(
            text.contains("--last <N>") && text.contains("expected a number of at least 1"),
            "{text}"
        );
    }
    let nobody = "01890000-0000-7000-8000-000000000000";
    assert!(said(&["show", &url, nobody], 3).contains("has no checkpoint"));
    assert!(said(&["retire", &url], 2).contains("--keep-last"));
    assert!(said(&["retire", &url, "1", "--keep-last", "2"], 2).contains("cannot be used with"));
    assert!(said(&["retire", &url, "--keep-best", "loss"], 2).contains("METRIC:COUNT:min"));
    assert!(said(&["gc", &url, "--grace", "soon"], 2).contains("--grace"));
    assert!(said(&["plot", &url, "a.png"], 2).contains("SVG"));
    let text = said(&["ls", "ftp://host/x?sig=hush"], 2);
    assert!(text.contains("ftp://host/x: give a path") && !text.contains("hush"), "{text}");
    // Nothing that may be a secret is repeated.
    for bad in ["hush", "=hush", "wrong=hush", "secret=a"] {
        let text = said(&["ls", "s3://bucket/x?sig=hush", "-o", bad, "-o", "secret=hush"], 2);
        assert!(!text.contains("hush") && text.contains("option"), "{text}");
    }
}

#[test]
fn the_picture_shows_every_step() {
    let dir = tempfile::tempdir().unwrap();
    let url = filled(dir.path());
    let path = dir.path().join("a.svg");
    // Whoever has the old picture open keeps it.
    std::fs::write(&path, "old").unwrap();
    std::fs::hard_link(&path, dir.path().join("old.svg")).unwrap();
    let figures = json(&["plot", &url, path.to_str().unwrap()]);
    assert_eq!(figures["checkpoints"].as_array().unwrap().len(), 5);
    let costs = figures["costs"].as_array().unwrap();
    let names: Vec<_> = costs.iter().map(|c| c["tensors"].as_str().unwrap()).collect();
    assert!(names.contains(&"model.blocks.*.up") && names.len() == 2, "{names:?}");
    let picture = std::fs::read_to_string(path).unwrap();
    assert!(picture.starts_with("<svg") && picture.ends_with("</svg>\n"));
    for step in 0..5 {
        assert!(picture.contains(&format!("<title>step {step}:")), "{step}");
    }
    assert_eq!(std::fs::read(dir.path().join("old.svg")).unwrap(), b"old");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3, "nothing else is left");
}

#[test]
fn a_restored_file_is_replaced_only_by_force() {
    let dir = tempfile::tempdir().unwrap();
    let url = filled(dir.path());
    for name in ["a.s4w", "a.safetensors"] {
        let out = dir.path().join(name);
        let restore = ["restore", &url, "4", out.to_str().unwrap()];
        said(&restore, 0);
        assert!(said(&restore, 5).contains("a.s") && out.metadata().unwrap().len() > 1000);
        said(&[&restore[..], &["--force"]].concat(), 0);
    }
}

/// On every server that `cargo xtask test` started: `S4_TEST_S3` is `name=endpoint,...`.
#[test]
fn options_and_environment_reach_a_bucket() {
    let Ok(servers) = std::env::var("S4_TEST_S3") else { return };
    for server in servers.split(',').filter(|s| !s.is_empty()) {
        let (_, endpoint) = server.split_once('=').unwrap();
        let url = format!("s3://s4test/cli-{}", std::process::id());
        let endpoint = format!("endpoint_url={endpoint}");
        let options =
            ["-o", &endpoint, "-o", "key=test", "-o", "secret=hush", "-o", "region=us-east-1"];
        let with = |verb: &[&str], code| said(&[verb, &options[..]].concat(), code);
        assert!(with(&["ls", &url], 3).contains("`s4w store init"));
        assert!(with(&["init", &url], 0).contains("store created"));
        let storage: s4weights::store::StorageOptions = options
            .iter()
            .filter_map(|o| o.split_once('='))
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .collect();
        let store = CheckpointStore::open(&url, &storage, StoreOptions::default()).unwrap();
        (0..3).for_each(|step| save(&store, step));
        assert!(with(&["ls", &url], 0).contains("3 checkpoints (1 base, 2 deltas)"));
        with(&["verify", &url, "--read-data"], 0);
        // The same from the environment.
        let out = Command::new(env!("CARGO_BIN_EXE_s4w"))
            .args(["store", "show", &url, "latest"])
            .env("AWS_ENDPOINT_URL", endpoint.trim_start_matches("endpoint_url="))
            .env("AWS_ACCESS_KEY_ID", "test")
            .env("AWS_SECRET_ACCESS_KEY", "hush")
            .env("AWS_REGION", "us-east-1")
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let text = with(&["show", &url, "9"], 3);
        assert!(text.contains("the nearest is 2") && !text.contains("hush"), "{text}");
    }
}

#[test]
fn a_restored_object_obeys_the_time_too() {
    let dir = tempfile::tempdir().unwrap();
    let url = filled(dir.path());
    // Nothing listens there.
    let settings = [
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9"),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "b"),
    ];
    let words =
        ["store", "restore", &url, "latest", "s3://bucket/a.s4w", "--force", "--timeout", "1"];
    let restore =
        || Command::new(env!("CARGO_BIN_EXE_s4w")).args(words).envs(settings).output().unwrap();
    // Without it, half a minute.
    let out = in_time::in_time(15.0, restore);
    assert_eq!(out.status.code(), Some(3), "{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn nothing_is_restored_into_the_store_that_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let url = filled(dir.path());
    let inside = dir.path().join("runs/a.safetensors");
    std::fs::write(&inside, "mine").unwrap();
    let mut outputs = vec![
        inside.display().to_string(),
        format!("{url}/../runs/b.s4w"),
        format!("file://{url}/b.s4w"),
    ];
    #[cfg(unix)]
    for (name, to) in [("file.safetensors", &inside), ("folder", &dir.path().join("runs"))] {
        std::os::unix::fs::symlink(to, dir.path().join(name)).unwrap();
        let link = dir.path().join(name);
        outputs.push(match name {
            "folder" => link.join("b.s4w").display().to_string(),
            _ => link.display().to_string(),
        });
    }
    for output in &outputs {
        for store in [url.clone(), format!("file://{url}")] {
            let text = said(&["restore", &store, "latest", output, "--force"], 2);
            assert!(text.contains("in the store that is read"), "{output}: {text}");
        }
    }
    assert_eq!(std::fs::read(&inside).unwrap(), b"mine");
    said(&["restore", &url, "latest", dir.path().join("b.s4w").to_str().unwrap()], 0);
}

#[test]
fn a_repair_names_the_store_that_it_repairs() {
    let dir = tempfile::tempdir().unwrap();
    let odd = dir.path().join("a#1 or b?").display().to_string();
    said(&["init", &odd, "--writers", "single"], 0);
    assert!(said(&["repair", &odd], 0).contains("b?: the log is intact"));
}
