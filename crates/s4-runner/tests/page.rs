//! The status page in a real browser, where there is one (`chromium`).

#![cfg(target_os = "linux")]

mod common;

use std::process::Command;

use common::Setup;

#[test]
fn child() {
    common::be_the_child();
}

/// The page after its script ran; `None` without a browser.
fn rendered(setup: &Setup, more: &[&str]) -> Option<String> {
    let mut browser = Command::new("chromium");
    browser.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]);
    browser.arg(format!("--user-data-dir={}", setup.path("browser").display()));
    browser.args(["--virtual-time-budget=3000", "--dump-dom"]).args(more);
    match browser.arg(format!("http://{}/", setup.http)).output() {
        Ok(done) => Some(String::from_utf8_lossy(&done.stdout).into_owned()),
        Err(_) => {
            eprintln!("no chromium here: the page is not looked at");
            None
        }
    }
}

#[test]
fn a_browser_shows_what_the_runner_says() {
    let setup = Setup::new("quota_bytes = 100000000\n");
    let daemon = setup.start();
    let (first, second) = (setup.save(41), setup.save(42));
    setup.wait(first, "durable");
    setup.wait(second, "durable");
    let Some(page) = rendered(&setup, &[]) else { return };
    for text in [
        r#"class="badge good" role="status">ready<"#,
        r#"<dt>Last durable step</dt><dd>42"#,
        r#"data-name="State"><span class="badge good">durable</span>"#,
        r#"data-name="Kind">base<"#,
        r#"data-name="Kind">delta<"#,
    ] {
        assert!(page.contains(text), "{text} is not in {page}");
    }
    daemon.stop();
    // A store that does not exist, and a name that would be markup if it were not inserted as text.
    let setup =
        Setup::new("store = \"/dev/null/<img src=x onerror=alert(1)>\"\ndrain_seconds = 1\n");
    let daemon = setup.start();
    let id = setup.save(7);
    let end = std::time::Instant::now() + common::LONG;
    while daemon.get("/v1/status").json()["store"]["error"].is_null() {
        assert!(std::time::Instant::now() < end);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    setup.wait(id, "verified");
    let page = rendered(&setup, &["--force-dark-mode", "--window-size=390,800"]).unwrap();
    assert!(page.contains(r#"class="badge bad" role="status">not ready<"#), "{page}");
    assert!(page.contains("<li class=\"bad\">the store: "), "{page}");
    assert!(page.contains("&lt;img src=x") && !page.contains("<img"), "{page}");
    daemon.stop();
}
