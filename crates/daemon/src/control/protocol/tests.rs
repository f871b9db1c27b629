use super::*;
use crate::control::protocol::checkpoint::Bitmaps;
use crate::failure::{Exit, Failure};

fn read(line: &str) -> Result<Command, Refusal> {
    Request::read(line.as_bytes()).and_then(|request| Command::read(&request))
}

fn text(text: &str) -> String {
    text.to_owned()
}

fn begin() -> Begin {
    Begin {
        name: text("c"),
        id: text("0f"),
        export: text("a"),
        bitmap: Some(text("new")),
        since: None,
        fleece_max: u64::MAX,
        targets: vec![text("/srv/a"), text("/srv/b")],
        uri: text("nbd+unix:///a?socket=/run/s"),
        socket: Some(text("/run/s")),
        listeners: 1,
        is_leased: true,
    }
}

#[test]
fn commands_survive_the_way() {
    let resize = Resize {
        size: SizeChange::Grow(512),
        shrink: true,
        preallocation: Some(String::from("full")),
    };
    let snapshot = Snapshot { file: Some(String::from("/a\n\"b")), internal: None };
    for command in [
        Command::Stats,
        Command::Topology,
        Command::Resize(resize),
        Command::Snapshot(snapshot),
        Command::Commit(Commit { top: None, base: Some(String::from("/b")), job: None }),
        Command::Commit(Commit {
            job: Some(Terms {
                name: Some(String::from("mine")),
                background: true,
                speed: 1 << 20,
                on_error: Some(String::from("stop")),
            }),
            ..Commit::default()
        }),
        Command::Job(JobCommand::List),
        Command::Accel(Accel { on: false }),
        Command::CopyOnRead(CopyOnRead { on: true }),
        Command::CheckpointBegin(Box::new(begin())),
        Command::CheckpointEnd(End { name: text("c"), id: None, bitmaps: Bitmaps::Merge }),
        Command::CheckpointList,
        Command::CheckpointDirty(Dirty { name: text("c"), first: 7 }),
        Command::Stop(Stop::default()),
        Command::Stop(Stop { force: true }),
    ] {
        let line = command.line();
        assert!(!line.contains('\n'), "{line}");
        assert_eq!(read(&line), Ok(command));
    }
}

#[test]
fn rubbish_is_refused_with_a_reason() {
    for (line, reason) in [
        ("", "not a line of JSON"),
        ("hello", "not a line of JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "'execute' is missing"),
        (r#"{"execute": 5}"#, "'execute' is missing or no text"),
        (r#"{"execute": "stats", "arguments": 1}"#, "'arguments' is no object"),
        (r#"{"execute": "stats", "argument": {}}"#, "unknown key 'argument'"),
        (r#"{"execute": "stats", "arguments": {"a": 1}}"#, "unknown field `a`"),
        (r#"{"execute": "reboot"}"#, "no such command: 'reboot'"),
        (r#"{"execute": "resize"}"#, "missing field `size`"),
        (r#"{"execute": "resize", "arguments": {"size": {"to": -1}}}"#, "invalid value"),
        (r#"{"execute": "resize", "arguments": {"size": {"to": 1e30}}}"#, "invalid type"),
    ] {
        let refusal = read(line).expect_err(line);
        assert!(refusal.text.contains(reason), "{line}: {}", refusal.text);
    }
    let deep = "[".repeat(10_000);
    assert!(read(&deep).is_err());
    assert!(Request::read(b"\xff\xfe\0").is_err());
}

#[test]
fn replies_survive_the_way() {
    let id = json!("x");
    let line = |value: Value| Reply::read(value.to_string().as_bytes());
    let older = json!({ "ringdisk": { "version": "0.1.0", "protocol": 1 } });
    for (greeting, tells_end) in [(greeting(), true), (older, false)] {
        assert_eq!(line(greeting), Some(Reply::Greeting { protocol: 1, tells_end }));
    }
    let text = String::from("a flush failed");
    assert_eq!(line(ended(12, &text)), Some(Reply::Ended { exit: 12, text }));
    assert_eq!(line(json!({ "ended": { "exit": 1000 } })), None);
    assert_eq!(line(done(Some(&id), json!({"a": 1}))), Some(Reply::Done(json!({"a": 1}))));
    assert_eq!(line(progress(None, 1, 2)), Some(Reply::Progress { done: 1, total: 2 }));
    let failure = Failure::new(Exit::Locked, "busy").hint("wait");
    assert_eq!(
        line(refused(Some(&id), &failure.into())),
        Some(Reply::Refused {
            text: String::from("busy"),
            hint: Some(String::from("wait")),
            exit: Some(5)
        })
    );
    assert_eq!(Reply::read(b"{}"), None);
    assert_eq!(Reply::read(b"rubbish"), None);
}
