use super::*;

fn shown(words: &[(&str, &str)], image: Option<(&str, Identity)>) -> Shown {
    Shown {
        takes_jobs: true,
        image: image.map(|(name, id)| Image { name: name.to_owned(), identity: Some(id) }),
        options: words.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
    }
}

#[test]
fn each_difference_is_named_with_both_values() {
    let old = shown(&[("--queues", "2"), ("--serial", "a"), ("--size", "")], None);
    assert_eq!(old.compare(&old, None, None), Ok(()));
    let new = shown(&[("--queues", "3"), ("--serial", ""), ("--size", "4096")], None);
    assert_eq!(
        old.compare(&new, None, None).expect_err("it differs"),
        "--queues is '2' there, '3' here; --serial is 'a' there, not given here; \
         --size is not given there, '4096' here"
    );
}

#[test]
fn options_that_only_one_of_two_versions_knows_are_not_compared() {
    let old = shown(&[("--queues", "2"), ("--old", "1")], None);
    let new = shown(&[("--queues", "2"), ("--new", "1")], None);
    assert_eq!(old.compare(&new, None, None), Ok(()));
    let nothing: Shown = serde_json::from_str("{\"of\":\"another version\"}").expect("words");
    assert_eq!(old.compare(&nothing, None, None), Ok(()));
}

#[test]
fn an_image_is_known_by_its_name_its_file_and_what_is_on_top_of_it() {
    let old = shown(&[], Some(("/a", (1, 2))));
    let top = shown(&[], Some(("/top", (1, 3)))).image;
    for same in [("/a", (1, 9)), ("/link", (1, 2)), ("/top", (1, 9)), ("/link", (1, 3))] {
        assert_eq!(old.compare(&shown(&[], Some(same)), top.as_ref(), None), Ok(()), "{same:?}");
    }
    let other = shown(&[], Some(("/b", (1, 4))));
    let why = old.compare(&other, top.as_ref(), None).expect_err("another image");
    assert_eq!(why, "the image is '/top', not '/b'");
    assert_eq!(old.compare(&other, None, None).expect_err("too"), "the image is '/a', not '/b'");
}

#[test]
fn the_format_of_words_that_name_the_image_on_top_is_that_of_this_image() {
    let named = |format, image| shown(&[("--format", format)], Some(image));
    let old = named("raw", ("/a", (1, 2)));
    let top = shown(&[], Some(("/top", (1, 3)))).image;
    let compare = |new: &Shown| old.compare(new, top.as_ref(), Some("qcow2"));
    assert_eq!(compare(&named("qcow2", ("/top", (1, 3)))), Ok(()));
    assert_eq!(compare(&named("raw", ("/a", (1, 2)))), Ok(()));
    let why = compare(&named("raw", ("/top", (1, 3)))).expect_err("it is none");
    assert_eq!(why, "--format is 'qcow2' there, 'raw' here");
    let why = compare(&named("qcow2", ("/a", (1, 2)))).expect_err("it is none");
    assert_eq!(why, "--format is 'raw' there, 'qcow2' here");
}
