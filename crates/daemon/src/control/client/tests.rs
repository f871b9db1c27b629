use serde_json::json;

use super::*;

fn of(stream: UnixStream, is_trusted: bool) -> Client {
    Client {
        stream,
        process: None,
        buffer: Vec::new(),
        tells_end: false,
        is_trusted,
        mountpoint: None,
        losses: 0,
        target_name: String::from("disk"),
    }
}

#[test]
fn a_server_that_talks_on_after_its_end_is_not_listened_to_for_ever() {
    for (first, ended) in [("{\"ended\": {\"exit\": 0}}\n", true), ("{}\n", false)] {
        let (stream, mut server) = UnixStream::pair().expect("sockets");
        let talks = std::thread::spawn(move || {
            let mut said = server.write_all(first.as_bytes());
            while said.is_ok() {
                said = server.write_all(b"{}\n");
            }
        });
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut client = of(stream, true);
            let end = client.wait_for_end(POLL_INTERVAL, false, &Progress::new());
            tell.send(end.map(|end| end.is_ok())).expect("somebody waits");
        });
        let end = told.recv_timeout(Duration::from_secs(60)).expect("it is left");
        assert_eq!(end, ended.then_some(true));
        talks.join().expect("no panic");
    }
}

/// What becomes of an answer of a server.
fn refused(answer: &Value, is_trusted: bool) -> Failure {
    let (stream, mut server) = UnixStream::pair().expect("sockets");
    server.write_all(format!("{answer}\n").as_bytes()).expect("it fits");
    let mut client = of(stream, is_trusted);
    let timeout = Timeout::Answer(Duration::from_secs(60));
    client.call(&Command::Stats, &Progress::new(), timeout).expect_err("refused")
}

#[test]
fn what_a_server_says_reaches_no_terminal_as_it_is() {
    let (bad, shown) = ("gone\u{1b}[2J\nerror: root", "gone\\u{1b}[2J\\nerror: root");
    let failure = refused(&json!({ "error": { "desc": bad, "hint": bad, "exit": 5 } }), true);
    assert_eq!((failure.message(), failure.hint_text()), (shown, Some(shown)));
}

#[test]
fn the_exit_code_of_another_users_server_does_not_count() {
    let answer = |exit: u64| json!({ "error": { "desc": "no", "exit": exit } });
    for (said, trusted) in [(5, 5), (12, 12), (0, 1), (77, 1), (300, 1)] {
        assert_eq!(refused(&answer(said), true).code(), trusted, "{said}");
        assert_eq!(refused(&answer(said), false).code(), 1, "{said}");
    }
}
