from prefixgate.proto.status_details import Details, Violation, field_violation, pack, retry_after, unpack


def test_what_is_said_is_read() -> None:
    data = pack(8, "no", field_violation("sampling.top_p", "2.0; must be at most 1"), retry_after(0.2501))
    # Up, so that who comes back then is not too early.
    assert unpack(data) == Details((Violation("sampling.top_p", "2.0; must be at most 1"),), 0.251)
    assert unpack(pack(3, "no")) == Details()


def test_what_is_no_status_says_nothing() -> None:
    for data in (b"", "", b"\xff\xff\xff", "text"):
        assert unpack(data) == Details()
