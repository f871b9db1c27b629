use super::*;

fn terms() -> Terms {
    Terms {
        mountpoint: PathBuf::from(std::ffi::OsString::from_vec(b"/tmp/\xff\"\nd".to_vec())),
        connection: 77,
        profile: Profile::new(4096, Some(256), true),
        negotiated: Negotiated { minor: 45, flags: 1 << 40, offered: u64::MAX, max_write: 1 << 20 },
        queues: 3,
    }
}

fn again(file: &StateFile) -> Result<StateFile, Failure> {
    StateFile::open(file.file.try_clone().expect("clone").into(), first())
}

/// What was sealed.
fn first() -> State {
    State::new(&terms(), 3, None, None)
}

#[test]
fn what_was_written_last_is_read() {
    let file = StateFile::make().expect("memory");
    let state = State::new(&terms(), 3, Some((1, 2)), Some(Format::Raw));
    let state = State { window: Some((512, Some(4096))), ..state };
    file.write(state.clone()).expect("room");
    let sealed = State::sealed(&state.seal().expect("memory").into()).expect("sealed");
    assert_eq!((&sealed, sealed.terms(), sealed.format()), (&state, terms(), Some(Format::Raw)));
    assert_eq!(sealed.top(), None);
    file.change("image", |state| state.with_top(Path::new("/a/b.qcow2"), Format::Qcow2));
    let found = again(&file).expect("a state").state().expect("written");
    assert_eq!(found.top(), Some((PathBuf::from("/a/b.qcow2"), Format::Qcow2)));
    assert_eq!(found.terms(), terms());
}

#[test]
fn only_the_images_count_of_what_is_said_after_the_start() {
    let file = StateFile::make().expect("memory");
    let other = Terms { mountpoint: PathBuf::from("/other"), connection: 1, queues: 99, ..terms() };
    let told = State {
        top: Some((Bytes::of(Path::new("/top")), String::from("raw"))),
        files: vec![(1, 2)],
        tops: vec![(5, 6)],
        window: Some((9, None)),
        protect_raw: true,
        ..State::new(&other, 7, Some((5, 6)), Some(Format::Qcow2))
    };
    file.write(told.clone()).expect("room");
    let found = again(&file).expect("a state").state().expect("written");
    assert_eq!(found, State { top: told.top, files: told.files, ..first() });
}

#[test]
fn another_version_and_nothing_are_refused_in_words() {
    let file = StateFile::make().expect("memory");
    assert!(again(&file).expect_err("empty").message().contains("not there"));
    let text = Versions::new(2, 2).to_text(&State::new(&terms(), 3, None, None)).expect("JSON");
    slots::IMAGES.put(&file.file, 1, text.as_bytes()).expect("room");
    let failure = again(&file).expect_err("newer");
    assert!(failure.message().contains("its version is 2, this program knows 1"), "{failure:?}");
}
