//! Input from outside: the page changes nothing, and messages of any kind are answered or refused.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "tests")]

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use common::server::{Reply, Server};
use common::{LONG, Setup, send};
use serde_json::{Value, json};
use uuid::Uuid;

#[test]
fn child() {
    common::be_the_child();
}

#[test]
fn the_page_offers_nothing_that_changes_anything() {
    let setup = Setup::default();
    let daemon = setup.start();
    for path in ["/", "/livez", "/healthz", "/metrics", "/version", "/v1/status"] {
        let answer = daemon.get(path);
        assert!(answer.status == 200 || path == "/healthz", "{path}: {}", answer.status);
        for method in ["POST", "PUT", "DELETE", "PATCH"] {
            let mut stream = TcpStream::connect(&setup.http).unwrap();
            assert_eq!(
                send(&mut stream, method, path, b"{}").unwrap().status,
                405,
                "{method} {path}"
            );
        }
    }
    for path in ["/v1/submissions", "/v1/flush", "/v1/drain", "/v1/restore", "/v1/staging"] {
        for method in ["GET", "POST"] {
            let mut stream = TcpStream::connect(&setup.http).unwrap();
            assert_eq!(
                send(&mut stream, method, path, b"{}").unwrap().status,
                404,
                "{method} {path}"
            );
        }
    }
    let page = daemon.get("/");
    assert!(page.head.contains("content-security-policy: default-src 'none'"), "{}", page.head);
    assert!(!page.text.contains("http://") && !page.text.contains("https://"), "no outside assets");
    assert!(page.text.contains("prefers-color-scheme: dark"));
    daemon.stop();
}

#[test]
fn metrics_are_what_prometheus_reads_and_agree_with_the_status() {
    let setup = Setup::default();
    // Its threads pause wherever they have just published a new state, so clients see only what was counted before.
    let daemon = setup.start_with("*:300", |_| {});
    let id = setup.save(7);
    setup.wait(id, "durable");
    assert_eq!(setup.submit(id, 7).status, 200, "it may be repeated");
    let text = daemon.get("/metrics").text;
    let sample = |name: &str| -> f64 {
        let line = text.lines().find(|l| l.split(' ').next() == Some(name));
        line.unwrap_or_else(|| panic!("no {name} in {text}"))
            .split(' ')
            .nth(1)
            .unwrap()
            .parse()
            .unwrap()
    };
    assert_eq!(sample("s4w_runner_accepted_total"), 1.0);
    assert_eq!(sample("s4w_runner_last_durable_step"), 7.0);
    assert_eq!(sample("s4w_runner_checkpoints{state=\"durable\"}"), 1.0);
    assert_eq!(sample("s4w_runner_durable_lag_seconds"), 0.0);
    assert_eq!(sample("s4w_runner_checkpoint_bytes_total{stage=\"raw\"}"), 80_000.0);
    assert_eq!(sample("s4w_runner_compress_duration_seconds_count"), 1.0);
    assert_eq!(sample("s4w_runner_upload_duration_seconds_count"), 1.0);
    assert!(text.ends_with("# EOF\n"), "{text}");
    // Each sample belongs to a family that was described.
    let described: Vec<&str> =
        text.lines().filter_map(|l| l.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap();
        assert!(described.iter().any(|d| name.starts_with(d)), "{line}");
    }
    daemon.stop();
}

#[test]
fn messages_of_any_kind_are_refused_with_their_reason() {
    let setup = Setup::default();
    let daemon = setup.start();
    let id = Uuid::new_v4();
    let refused = |body: &[u8]| -> (u16, Value) {
        let mut stream = UnixStream::connect(setup.path("s4w.sock")).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let answer = send(&mut stream, "POST", "/v1/submissions", body).unwrap();
        (answer.status, serde_json::from_str(&answer.text).unwrap_or_default())
    };
    let big = json!({ "id": id, "step": 1, "tags": { "a": "x".repeat(40_000) } }).to_string();
    let long = json!({ "id": id, "step": 1, "tags": { "a": "x".repeat(20_000) } }).to_string();
    let many: serde_json::Map<_, _> = (0..65).map(|n| (n.to_string(), json!(1.0))).collect();
    let many = json!({ "id": id, "step": 1, "metrics": many }).to_string();
    let own = json!({ "id": id, "step": 1, "tags": { "s4w.submission": "x" } }).to_string();
    let deep = "[".repeat(10_000);
    for (case, body, status) in [
        ("nothing", "", 400),
        ("no JSON", "abc", 400),
        ("a nest", &deep, 422),
        ("another type", "[1]", 422),
        ("a list of the members", &format!(r#"["{id}",1,{{}},{{}}]"#), 422),
        ("a member too many", &format!(r#"{{"id":"{id}","step":1,"path":"/etc/passwd"}}"#), 422),
        ("a path for an id", r#"{"id":"../../../etc/passwd","step":1}"#, 422),
        ("a negative step", &format!(r#"{{"id":"{id}","step":-1}}"#), 422),
        ("a step too large", &format!(r#"{{"id":"{id}","step":99999999999999999999}}"#), 422),
        (
            "a number too large",
            &format!(r#"{{"id":"{id}","step":1,"metrics":{{"a":1e999}}}}"#),
            400,
        ),
        ("too many bytes", &big, 413),
        ("too long", &long, 400),
        ("too many metrics", &many, 400),
        ("the runner's own tag", &own, 400),
        ("no file", &format!(r#"{{"id":"{id}","step":1}}"#), 404),
    ] {
        let (found, answer) = refused(body.as_bytes());
        assert_eq!(found, status, "{case}: {answer}");
        assert!(answer["message"].as_str().is_some_and(|m| !m.is_empty()), "{case}: {answer}");
    }
    assert_eq!(refused(&[0xff; 100]).0, 400);
    let unknown = format!("/v1/submissions/{id}?state=later");
    for (method, path, status) in [
        ("GET", "/v1/submissions/..%2f..%2fetc", 400),
        ("GET", "/v1/submissions/../../etc", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", &unknown, 400),
        ("GET", "/v1/interruption?timeout_ms=soon", 400),
        ("DELETE", "/v1/status", 405),
    ] {
        let answer = setup.ask(method, path, None).unwrap();
        assert_eq!(answer.status, status, "{path}");
        let said: Value = serde_json::from_str(&answer.text).unwrap();
        assert!(said["message"].as_str().is_some_and(|m| !m.is_empty()), "{path}: {said}");
    }
    daemon.stop();
}

#[test]
fn bytes_of_any_kind_do_no_harm() {
    let setup = Setup::default();
    let daemon = setup.start();
    let mut random: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let good = b"POST /v1/submissions HTTP/1.1\r\nhost: a\r\ncontent-length: 20\r\n\r\n{\"id\":\"a\",\"step\":1}!";
    for round in 0..300 {
        let mut bytes = good.to_vec();
        for _ in 0..=next() % 8 {
            let at = (next() % bytes.len() as u64) as usize;
            match next() % 3 {
                0 => bytes[at] = next() as u8,
                1 => bytes.truncate(at.max(1)),
                _ => bytes.insert(at, next() as u8),
            }
        }
        let give = |stream: &mut dyn Write| drop(stream.write_all(&bytes));
        if round % 2 == 0 {
            give(&mut TcpStream::connect(&setup.http).unwrap());
        } else {
            give(&mut UnixStream::connect(setup.path("s4w.sock")).unwrap());
        }
    }
    // A head without end is cut off.
    let mut stream = TcpStream::connect(&setup.http).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let _ = stream.write_all(b"GET / HTTP/1.1\r\n");
    let _ = stream.write_all(&b"a: b\r\n".repeat(50_000));
    let mut answer = vec![];
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 4"), "{answer:?}");
    let id = setup.save(1);
    setup.wait(id, "durable");
    daemon.stop();
}

#[test]
fn the_socket_is_for_its_users_alone() {
    let setup = Setup::default();
    let daemon = setup.start();
    let mode = std::fs::metadata(setup.path("s4w.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    if !rustix_is_root() {
        daemon.stop();
        return;
    }
    // Another user who can connect to the socket is refused.
    std::fs::set_permissions(setup.dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::set_permissions(setup.path("s4w.sock"), PermissionsExt::from_mode(0o666)).unwrap();
    let ask = |uid: u32, method: &str, path: &str| {
        let script = format!(
            "import socket,os\nos.setgid({uid}); os.setuid({uid})\ns=socket.socket(socket.AF_UNIX)\n\
             s.connect({:?})\ns.sendall(b'{method} {path} HTTP/1.1\\r\\nhost: a\\r\\nconnection: close\\r\\n\
             content-type: application/json\\r\\ncontent-length: 2\\r\\n\\r\\n{{}}')\n\
             print(s.makefile().readline())",
            setup.path("s4w.sock")
        );
        let done = Command::new("python3").args(["-c", &script]).output().unwrap();
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        text.split(' ')
            .nth(1)
            .and_then(|s| s.parse::<u16>().ok())
            .unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&done.stderr)))
    };
    for path in ["/v1/status", "/v1/staging"] {
        assert_eq!(ask(12345, "GET", path), 403, "{path}");
    }
    for path in ["/v1/flush", "/v1/restore", "/v1/drain", "/v1/forget"] {
        assert_eq!(ask(12345, "POST", path), 403, "{path}");
    }
    daemon.stop();
    // A user named in `allow_uids` may submit, but not end the service.
    let setup = Setup::new("allow_uids = [12345]\n");
    let daemon = setup.start();
    std::fs::set_permissions(setup.dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::set_permissions(setup.path("s4w.sock"), PermissionsExt::from_mode(0o666)).unwrap();
    let ask = |path: &str| {
        let script = format!(
            "import socket,os\nos.setgid(12345); os.setuid(12345)\ns=socket.socket(socket.AF_UNIX)\n\
             s.connect({:?})\ns.sendall(b'POST {path} HTTP/1.1\\r\\nhost: a\\r\\nconnection: close\\r\\n\
             content-type: application/json\\r\\ncontent-length: 2\\r\\n\\r\\n{{}}')\n\
             print(s.makefile().readline())",
            setup.path("s4w.sock")
        );
        let done = Command::new("python3").args(["-c", &script]).output().unwrap();
        String::from_utf8_lossy(&done.stdout).into_owned()
    };
    assert!(ask("/v1/flush").contains(" 200 "), "{}", ask("/v1/flush"));
    assert!(ask("/v1/drain").contains(" 403 "));
    daemon.stop();
}

fn rustix_is_root() -> bool {
    let id = Command::new("id").arg("-u").output().unwrap();
    id.stdout.starts_with(b"0")
}

#[test]
fn no_secret_is_shown() {
    let secret = "s3cr3t-do-not-show";
    let dead = Server::start(|_| Reply::new(403, "<Error><Code>AccessDenied</Code></Error>"));
    let more = format!(
        "store = \"s3://bucket/run\"\ndrain_seconds = 1\n[storage_options]\nsecret = \"{secret}\"\n\
         key = \"AKIA\"\nregion = \"us-east-1\"\nendpoint_url = \"{}\"\n",
        dead.url
    );
    let setup = Setup::new(&more);
    let log = setup.path("log");
    let file = std::fs::File::create(&log).unwrap();
    let daemon = setup.start_with("", |command| {
        command.stderr(file);
    });
    let id = setup.save(1);
    let end = std::time::Instant::now() + LONG;
    while setup.wait(id, "staged")["error"].is_null() {
        assert!(std::time::Instant::now() < end);
        std::thread::sleep(Duration::from_millis(50));
    }
    let state = setup.wait(id, "staged");
    assert_eq!(state["state"].as_str().map(|s| s == "durable" || s == "failed"), Some(false));
    for path in ["/", "/v1/status", "/metrics", "/healthz", "/readyz?verbose"] {
        let text = daemon.get(path).text;
        assert!(!text.contains(secret) && !text.contains("AKIA"), "{path}: {text}");
    }
    assert!(daemon.get("/metrics").text.contains("errors_total{kind=\"permission\"}"));
    daemon.stop();
    assert!(!std::fs::read_to_string(&log).unwrap().contains(secret));
}

#[test]
fn a_spot_notice_is_heard_and_told() {
    let notice = r#"{"action":"terminate","time":"2026-11-23T10:00:00Z"}"#;
    let imds = Server::start(move |request| match request.path.as_str() {
        "/latest/api/token" => Reply::new(200, "t0ken"),
        "/latest/meta-data/spot/instance-action" => Reply::new(200, notice),
        _ => Reply::new(404, ""),
    });
    let setup = Setup::new(&format!("spot = true\nimds = \"{}\"\n", imds.url));
    let daemon = setup.start();
    let heard = setup.ask("GET", "/v1/interruption?timeout_ms=60000", None).unwrap().json();
    assert_eq!(heard["interruption"]["source"], "spot", "{heard}");
    assert_eq!(heard["interruption"]["detail"], "terminate at 2026-11-23T10:00:00Z");
    let status = daemon.get("/v1/status").json();
    assert_eq!(status["mode"], "urgent");
    // The trainer's last checkpoint is still accepted.
    let id = setup.save(1);
    assert_eq!(setup.wait(id, "durable")["state"], "durable");
    assert_eq!(imds.seen.lock().unwrap()[0].method, "PUT");
    daemon.stop();
}

#[test]
fn usr1_lets_the_newest_go_first() {
    let setup = Setup::default();
    std::fs::write(setup.store(), "").unwrap();
    let daemon = setup.start();
    let ids: Vec<Uuid> = (1..=3).map(|step| setup.save(step)).collect();
    ids.iter().for_each(|id| drop(setup.wait(*id, "verified")));
    daemon.signal("USR1");
    let heard = setup.ask("GET", "/v1/interruption?timeout_ms=60000", None).unwrap().json();
    assert_eq!(heard["interruption"]["source"], "usr1", "{heard}");
    std::fs::remove_file(setup.store()).unwrap();
    let durable_at = |id: &Uuid| setup.wait(*id, "durable")["durable_ms"].as_i64().unwrap();
    let times: Vec<i64> = ids.iter().map(durable_at).collect();
    // The third is a delta of the first, which must go before it; the second is last.
    assert!(times[2] <= times[1] && times[0] <= times[2], "{times:?}");
    daemon.stop();
    setup.check_store(&[1, 2, 3]);
    // A trainer that resumes gets the newest one, although it was uploaded first.
    let listed: Vec<u64> = setup.open_store().list().unwrap().iter().map(|c| c.step()).collect();
    assert_eq!(listed, [1, 2, 3]);
    assert_eq!(setup.open_store().latest().unwrap().unwrap().step(), 3);
}
